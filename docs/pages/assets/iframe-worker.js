// Browsers start no worker from a file. On pages that are read from disk the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.ready = new Promise((done) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        document.body.appendChild(frame);
        this.inside = frame.contentWindow;
        this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        frame.contentDocument.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
