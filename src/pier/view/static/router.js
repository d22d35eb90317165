// Shows the page named by the URL's fragment, in a one-file export.
(() => {
  const pages = new Map([...document.querySelectorAll("template[data-path]")].map((each) => [each.dataset.path, each]));
  const show = () => {
    const [path, anchor] = decodeURIComponent(location.hash.replace(/^#\//, "")).split("#");
    const found = pages.get(path) || pages.get(document.body.dataset.start) || [...pages.values()][0];
    for (const name of ["page", "live", "job", "trial", "tab", "state"]) {
      if (found.dataset[name] === undefined) delete document.body.dataset[name]; else document.body.dataset[name] = found.dataset[name];
    }
    document.getElementById("page").replaceChildren(found.content.cloneNode(true));
    dispatchEvent(new Event("pier-page"));
    const step = anchor && document.getElementById(anchor);
    if (step) step.scrollIntoView(); else scrollTo(0, 0);
  };
  addEventListener("hashchange", () => { if (!location.hash || location.hash.startsWith("#/")) show(); });
  show();
})();
