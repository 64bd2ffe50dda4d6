// Names and keyboard access that the theme leaves out.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
const reach = () => document.querySelectorAll(".md-typeset :is(pre > code, table:not([class]), .equation)").forEach((box) => {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
reach();
addEventListener("resize", reach);
new MutationObserver((changes) => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav) => nav.setAttribute("aria-label", `Code ${nav.parentElement.id}`));
  reach();
}).observe(document.body, { childList: true, subtree: true });
