// Before the first paint: the remembered theme, so that nothing flashes.
try {
  const theme = localStorage.getItem("dampen-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is not allowed here: the system's theme */ }
