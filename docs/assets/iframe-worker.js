// The site's search where pages are files: browsers refuse workers of files, so the worker's script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<html></html>"
      this.loaded = new Promise(resolve => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const tag = inner.document.createElement("script")
          tag.src = new URL(script, document.baseURI)
          tag.addEventListener("load", () => resolve(inner))
          inner.document.head.append(tag)
        }, { once: true })
      })
      document.documentElement.append(frame)
    }

    // What the page sends waits until the script listens.
    postMessage(data) {
      this.loaded.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
