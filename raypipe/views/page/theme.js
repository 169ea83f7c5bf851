// Before anything is drawn: light or dark, as chosen before or as the system has it.
let chosen = null;
try { chosen = localStorage.getItem("raypipe-theme"); } catch { /* A browser may forbid it. */ }
const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = isDark ? "dark" : "light";
