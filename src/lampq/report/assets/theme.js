"use strict";
// before anything is drawn: the theme that the system asks for
document.documentElement.dataset.theme =
  window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
