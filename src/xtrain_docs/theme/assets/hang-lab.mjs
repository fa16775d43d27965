/* The hang lab: shows the forms and judges. Why a rank is wrong stands in its option, why
   a call is in the form; the right answer is the part below, which opens. */

for (const form of document.querySelectorAll("form[data-call]")) {
  const { rank, call } = form.elements;
  const words = form.querySelector("[role=status]");
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const known = form.dataset.call.split(" ").includes(call.value);
    const wrong = rank.selectedOptions[0].dataset.wrong ?? (known ? null : form.dataset.wrong);
    words.textContent = wrong ?? "Right. Why, and the cure, stand below.";
    words.classList.toggle("xt-bad", wrong !== null);
    words.classList.toggle("xt-good", wrong === null);
    if (wrong === null) form.parentElement.querySelector("details").open = true;
  });
}
