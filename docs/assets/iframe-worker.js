// A page from the disk may start no worker: there the search runs in a hidden frame instead, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.srcdoc = "<!doctype html><script>postMessage = data => parent.dispatchEvent(new MessageEvent('searched', { data }));" +
        "<\/script><script src=\"" + new URL(address, location).href + "\"><\/script>";
      this.ready = new Promise(done => frame.addEventListener("load", () => done(frame.contentWindow), { once: true }));
      window.addEventListener("searched", ({ data }) => this.dispatchEvent(new MessageEvent("message", { data })));
      document.body.append(frame);
    }
    async postMessage(data) {
      (await this.ready).dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {}
  };
}
