// Light, dark, or as the system says. A plain script in the head, so that no page flashes white.
(() => {
  const NAME = "penstock.theme";
  const THEMES = ["system", "light", "dark"];

  function stored() {
    try {
      const theme = localStorage.getItem(NAME);
      return THEMES.includes(theme) ? theme : "system";
    } catch {
      return "system";
    }
  }

  function keep(theme) {
    try {
      localStorage.setItem(NAME, theme);
    } catch {
      // A browser that keeps nothing: the choice lasts as long as the page.
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
  }

  function showOn(button) {
    const { theme } = document.documentElement.dataset;
    const label = `Colours: ${theme}. Change`;
    button.setAttribute("aria-label", label);
    button.title = label;
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    showOn(button);
    button.addEventListener("click", () => {
      const { theme } = document.documentElement.dataset;
      const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      apply(next);
      keep(next);
      showOn(button);
    });
  });
})();
