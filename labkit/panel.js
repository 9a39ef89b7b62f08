function render({ el }) {
  // plotly draws before the figure has its place on the page; follow the width it gets, then and whenever it changes.
  const observer = new ResizeObserver((entries) => {
    for (const entry of entries) entry.target.querySelector(".js-plotly-plot")?._responsiveChartHandler?.();
  });
  let frame = requestAnimationFrame(function ready() {
    const panel = el.closest(".labkit-panel");
    const box = panel?.querySelector(".labkit-figure");
    if (!box?.querySelector(".main-svg, canvas, .widget-html-content")) {
      frame = requestAnimationFrame(ready);
      return;
    }
    observer.observe(box);
    // In command mode JupyterLab would take arrows, Enter and letters for itself (D D deletes a cell).
    panel.querySelector(".labkit-controls").addEventListener("keydown", (event) => {
      const shortcut = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.key === "Escape";
      if (!shortcut) event.stopPropagation();
    });
    for (const handle of panel.querySelectorAll(".noUi-handle")) {
      const label = handle.closest(".widget-slider")?.querySelector(".widget-label");
      if (label) handle.setAttribute("aria-label", label.textContent); // sliders come without a name for screen readers
    }
  });
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
  };
}
export default { render };
