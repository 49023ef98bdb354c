// Light, dark, or as the system says. A plain script in the head, so that no page flashes white.
(() => {
  const NAME = "penstock.theme";
  const THEMES = ["system", "light", "dark"];
  const { dataset } = document.documentElement;

  /**
   * A browser that keeps nothing throws: the choice lasts as long as the page.
   * @template T
   * @param {() => T} act
   */
  function tried(act) {
    try {
      return act();
    } catch {
      return null;
    }
  }


  let theme = tried(() => localStorage.getItem(NAME)) ?? "system";
  if (!THEMES.includes(theme)) theme = "system";
  dataset.theme = theme;
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (button === null) return;
    const show = () => (button.ariaLabel = button.title = `Colours: ${theme}. Change`);
    show();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      dataset.theme = theme;
      tried(() => localStorage.setItem(NAME, theme));
      show();
    });
  });
})();
