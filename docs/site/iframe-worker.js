// Search without a server: browsers start no worker from a file, so a hidden frame runs the worker's script. The
// theme's own such file would be fetched from the network; it leaves it out where this name is among the polyfills.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          script.onload = loaded;
          script.onerror = failed;
          script.src = source;
          inside.document.head.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
