// plotly's widget with its 4.9 MB of code brought to a page once, not once a figure, and outside the two seconds that
// anywidget grants a model to initialize: on a busy machine reading the code takes longer, and the plot would stay empty.
const MESSAGES = [
  "addTraces", "restyle", "relayout", "update", "animate", "deleteTraces", "moveTraces", "removeLayoutProps", "removeTraceProps",
].map((name) => `_py2js_${name}`);

async function load(model) {
  const id = model.get("_plotly").slice("IPY_MODEL_".length);
  const engine = await model.widget_manager.get_model(id);
  const key = `labkit-plotly-${engine.get("version")}`;
  globalThis[key] ??= import(URL.createObjectURL(new Blob([engine.get("code")], { type: "text/javascript" })));
  const { default: widget } = await globalThis[key];
  return typeof widget === "function" ? widget() : widget;
}

// anywidget turns away whatever the kernel sends to a model that took longer than two seconds, for good; so a plot that came
// late on a busy machine would never follow a control. Once initialized, it takes its messages as any Jupyter widget does.
function listen(model) {
  const self = model.set({}); // Backbone returns the model behind anywidget's proxy
  const { _handle_comm_msg: handle } = Object.getPrototypeOf(Object.getPrototypeOf(self));
  self.comm?.on_msg(handle.bind(self));
}

export default () => {
  let ready;
  return {
    initialize(context) {
      const { model } = context;
      listen(model);
      const early = []; // what the kernel sent before plotly was there
      const listeners = MESSAGES.map((name) => [`change:${name}`, () => early.push([name, model.get(name)])]);
      for (const listener of listeners) model.on(...listener);
      ready = load(model).then(async (figure) => {
        for (const listener of listeners) model.off(...listener);
        await figure.initialize?.(context);
        for (const message of early) model.set(...message);
        return figure;
      });
    },
    async render(context) {
      return (await ready).render(context);
    },
  };
};
