// Plays the cameras of an episode in step: videos by the browser, and what it cannot play frame by frame from raypipe.
//
// Each camera is a screen with the same few methods. The first video that plays leads; the others follow it. While any
// screen waits for its frame, all wait.

import { element } from "/plots.js";

const AHEAD = 24, IN_FLIGHT = 4;

class VideoScreen {
  constructor(camera, address, fps, onFail) {
    this.start = camera.start_s; this.fps = fps;
    this.video = element("video", { class: "waits", preload: "auto", playsinline: "", muted: "" });
    this.video.muted = true;
    this.video.addEventListener("error", onFail);
    // The first frames of the file are another episode's, until the seek is done.
    this.video.addEventListener("seeked", () => this.video.classList.remove("waits"));
    this.video.src = address;
    this.node = this.video;
  }
  get isReady() { return this.video.readyState >= 3 && !this.video.seeking; }
  get frame() { return Math.floor((this.video.currentTime - this.start) * this.fps + 1e-3); }
  // The middle of a frame's time: its ends are rounded.
  show(frame) { this.video.currentTime = this.start + (frame + 0.5) / this.fps; }
  play(rate) { this.video.playbackRate = rate; this.video.play().catch(() => {}); }
  pause() { this.video.pause(); }
  follow(leader, rate) {
    const drift = (this.video.currentTime - this.start) - (leader.video.currentTime - leader.start);
    if (Math.abs(drift) > Math.max(0.25, 4 / this.fps)) this.video.currentTime = leader.video.currentTime - leader.start + this.start;
    else this.video.playbackRate = rate * (Math.abs(drift) > 0.25 / this.fps ? 1 - Math.max(-0.1, Math.min(0.1, drift * 2)) : 1);
  }
  close() { this.video.removeAttribute("src"); this.video.load(); }
}

class StillsScreen {
  constructor(address, length, onError) {
    Object.assign(this, { address, length, onError, wanted: 0, shown: -1, flying: 0, isClosed: false });
    this.node = element("canvas");
    this.frames = new Map();
  }
  get isReady() { return this.shown === this.wanted || this.frames.get(this.wanted) === "failed"; }
  show(frame) { this.wanted = frame; this.paint(); this.fetchAhead(); }
  play() {}
  pause() {}
  paint() {
    const picture = this.frames.get(this.wanted);
    if (!picture || picture === "flying" || picture === "failed" || this.shown === this.wanted) return;
    if (this.node.width !== picture.width || this.node.height !== picture.height) {
      this.node.width = picture.width; this.node.height = picture.height;
    }
    this.node.getContext("2d").drawImage(picture, 0, 0);
    this.shown = this.wanted;
  }
  fetchAhead() {
    for (const [frame, picture] of this.frames) {
      if (picture !== "flying" && (frame < this.wanted - AHEAD || frame > this.wanted + 2 * AHEAD)) this.frames.delete(frame);
    }
    const stop = Math.min(this.length, this.wanted + AHEAD);
    for (let frame = this.wanted; frame < stop && this.flying < IN_FLIGHT; frame++) {
      if (!this.frames.has(frame)) this.fetch(frame);
    }
  }
  async fetch(frame) {
    this.frames.set(frame, "flying"); this.flying++;
    try {
      const answer = await fetch(`${this.address}&frame=${frame}`);
      if (!answer.ok) throw new Error((await answer.json()).error);
      this.frames.set(frame, await createImageBitmap(await answer.blob()));
    } catch (error) {
      this.frames.set(frame, "failed");
      if (!this.isClosed && frame === this.wanted) this.onError(error.message);
    }
    this.flying--;
    if (!this.isClosed) { this.paint(); this.fetchAhead(); }
  }
  close() { this.isClosed = true; this.frames.clear(); }
}

export class Player {
  constructor(root, episode, fps, onFrame, onState) {
    Object.assign(this, { root, episode, fps, onFrame, onState, frame: 0, rate: 1, isPlaying: false, isWaiting: false });
    this.screens = episode.cameras.map((camera, place) => this.build(camera, place));
    this.tick = this.tick.bind(this);
  }

  build(camera, place) {
    const box = element("div", { class: "screen" }), how = element("span", { class: "dim how" });
    box.style.aspectRatio = `${Math.max(1, camera.width)} / ${Math.max(1, camera.height)}`;
    const size = element("span", { class: "dim", text: `${camera.width}x${camera.height}` });
    const caption = element("figcaption", {}, element("b", { text: camera.short, title: camera.name }), size, how);
    this.root.append(element("figure", { class: "camera" }, box, caption));
    const slot = { box, how, screen: null };
    const address = (kind) => `/${kind}?episode=${this.episode.episode}&camera=${place}`;
    const fail = (text) => { slot.screen?.close(); slot.screen = null; box.replaceChildren(element("p", { text })); };
    const stills = (why) => {
      slot.screen?.close();
      how.textContent = `frame by frame: ${why}`;
      slot.screen = new StillsScreen(address("frame"), this.episode.length, fail);
      box.replaceChildren(slot.screen.node);
      slot.screen.show(this.frame);
    };
    if (camera.error) fail(camera.error);
    else if (camera.start_s === null) stills(camera.why);
    else {
      slot.screen = new VideoScreen(camera, address("video"), this.fps, () => stills("this browser cannot play the video"));
      box.append(slot.screen.node);
      slot.screen.show(this.frame);
    }
    return slot;
  }

  get shown() { return this.screens.map((one) => one.screen).filter((one) => one !== null); }
  get leader() { return this.shown.find((one) => one instanceof VideoScreen); }

  seek(frame) {
    this.frame = Math.min(this.episode.length - 1, Math.max(0, frame));
    for (const one of this.shown) one.show(this.frame);
    this.clock = null;
    this.onFrame(this.frame);
  }

  play() {
    if (this.frame >= this.episode.length - 1) this.seek(0);
    this.isPlaying = true; this.isWaiting = true; this.clock = null;
    this.onState(); requestAnimationFrame(this.tick);
  }

  pause() {
    if (!this.isPlaying) return;
    this.isPlaying = false;
    for (const one of this.shown) one.pause();
    this.seek(this.frame);
    this.onState();
  }

  toggle() { if (this.isPlaying) this.pause(); else this.play(); }
  setRate(rate) { this.rate = rate; this.clock = null; if (this.isPlaying && !this.isWaiting) this.start(); }
  start() { for (const one of this.shown) one.play(this.rate); }

  tick(now) {
    if (!this.isPlaying) return;
    requestAnimationFrame(this.tick);
    const isReady = this.shown.every((one) => one.isReady);
    if (!isReady) {
      if (!this.isWaiting) for (const one of this.shown) one.pause();
      this.isWaiting = true; this.clock = null;
      return;
    }
    if (this.isWaiting) { this.isWaiting = false; this.start(); }
    this.advance(now);
  }

  advance(now) {
    const leader = this.leader;
    let frame;
    if (leader) frame = leader.frame;
    else {
      this.clock ??= { now, frame: this.frame };
      frame = this.clock.frame + Math.floor(((now - this.clock.now) / 1000) * this.fps * this.rate);
      // One after the other: a frame that is not there yet is waited for.
      if (frame > this.frame + 8) { frame = this.frame + 8; this.clock = { now, frame }; }
    }
    if (frame >= this.episode.length - 1 || leader?.video.ended) {
      this.frame = this.episode.length - 1;
      this.pause();
      return;
    }
    for (const one of this.shown) {
      if (one instanceof StillsScreen) one.show(Math.max(0, frame));
      else if (one !== leader) one.follow(leader, this.rate);
    }
    this.frame = Math.max(0, frame);
    this.onFrame(this.frame);
  }

  close() {
    this.isPlaying = false;
    for (const one of this.shown) one.close();
  }
}
