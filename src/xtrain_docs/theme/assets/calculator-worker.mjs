/* Python in a worker: Pyodide, and the modules of xtrain.zip. */

const BASE = new URL("./pyodide/", import.meta.url);
let ready = null;

async function start() {
  const { loadPyodide } = await import(new URL("pyodide.mjs", BASE));
  const python = await loadPyodide({ indexURL: BASE.href });
  const archive = await fetch(new URL("xtrain.zip", BASE));
  if (!archive.ok) throw new Error(`xtrain.zip: ${archive.status}`);
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  python.runPython(`
import json
from xtrain_docs.calculators.answers import answer
def call(name, values):
    try:
        return json.dumps({"answer": answer(name, json.loads(values))})
    except ValueError as problem:
        return json.dumps({"error": str(problem)})
`);
  return python.globals.get("call");
}

onmessage = async ({ data: { id, name, values } }) => {
  try {
    const call = await (ready ??= start());
    postMessage({ id, ...JSON.parse(call(name, JSON.stringify(values))) });
  } catch (problem) {
    postMessage({ id, error: String(problem.message).trim().split("\n").at(-1) });
  }
};
