/* Python in a worker that checks a reader's file: Pyodide, and the modules of drills.zip. */

const BASE = new URL("./", import.meta.url);

async function start() {
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", BASE));
  const home = new URL("pyodide/", BASE).href;
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: home, enableRunUntilComplete: false }),
    fetch(new URL("drills/drills.zip", BASE)),
  ]);
  if (!archive.ok) throw new Error(`drills.zip: ${archive.status}`);
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  python.runPython(`
from xtrain.practice import page
from xtrain.practice.drills import drill
page.start()
def prepare(name):
    page.known(name, drill(name).solution)
`);
  return { python, answer: python.pyimport("xtrain.practice.page").answer, prepare: python.globals.get("prepare") };
}

const ready = start();
ready.then(
  () => postMessage({ ready: true }),
  (problem) => postMessage({ id: 0, error: String(problem.message).trim().split("\n").at(-1) }));

/* Without a file: what every answer on that drill needs is computed ahead. */
onmessage = async ({ data: { id, name, source, ranks } }) => {
  const { python, answer, prepare } = await ready;
  if (source === undefined) return prepare(name);
  let said;
  try {
    said = { answer: JSON.parse(answer(name, source, ranks)) };
  } catch (problem) {
    said = { error: String(problem.message).trim().split("\n").at(-1) };
  }
  postMessage({ id, ...said, heap: python._module.HEAPU8?.length ?? 0 });
};
