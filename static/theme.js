// Light, dark, or as the system says. A plain script in the head, so that no page flashes white.
(() => {
  const NAME = "penstock.theme";
  const THEMES = ["system", "light", "dark"];
  const { dataset } = document.documentElement;

  /** A browser that keeps nothing throws: the choice lasts as long as the page. */
  function tried(act) {
    try {
      return act();
    } catch {
      return null;
    }
  }

  const kept = tried(() => localStorage.getItem(NAME));
  dataset.theme = THEMES.includes(kept) ? kept : "system";
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => (button.ariaLabel = button.title = `Colours: ${dataset.theme}. Change`);
    show();
    button.addEventListener("click", () => {
      dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
      tried(() => localStorage.setItem(NAME, dataset.theme));
      show();
    });
  });
})();
