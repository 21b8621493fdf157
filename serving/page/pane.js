// One answer on the page: its tokens coloured by origin, its figures, and a chart of what each pass of the target gave.
// A model's text goes into the page as text nodes only.

const WORDS = {
  draft: "accepted draft",
  bonus: "bonus: the target's own token after the drafts",
  plain: "plain: the target's own token, without drafts",
};
const MOST_COLUMN_PX = 12;
const LEAST_ROWS = 5; // blocks that the chart has room for; more make them flatter

export class Pane {
  // `tip` shows the details of a token, or of none.
  constructor(root, tip) {
    this.root = root;
    this.answer = root.querySelector(".answer");
    this.chart = root.querySelector(".chart");
    this.beside = null; // the pane that this one is compared with: their charts have one scale
    this.clear();
    this.watchTokens(tip);
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  clear() {
    this.text = "";
    this.ids = [];
    this.passes = []; // per pass of the target that gave tokens: {draft, bonus, plain}
    this.counts = { draft: 0, bonus: 0, plain: 0 };
    this.spec = null; // the response's own figures, once it has ended
    this.startedAt = this.firstAt = this.lastAt = null;
    this.current = null; // the token that `tip` is about
    this.answer.replaceChildren();
    this.seenHeight = 0;
    this.paint();
  }

  start() {
    this.clear();
    this.startedAt = performance.now();
    this.answer.setAttribute("aria-busy", "true"); // read out when it is whole, not token by token
  }

  take(chunk) {
    const tokens = chunk.tokens ?? [];
    if (tokens.length) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.addPass(tokens);
    }
    if (chunk.metrics) this.spec = chunk.metrics.speculative_decoding;
    this.paintSoon();
  }

  end() {
    this.answer.setAttribute("aria-busy", "false");
    this.paint();
  }

  // -- figures --------------------------------------------------------------------------------------------------------

  // After the first pass: the second of two answers finds the prompt in its slot and would win what the first one read.
  get seconds() {
    return this.lastAt === null ? null : (this.lastAt - this.firstAt) / 1000;
  }

  get speed() {
    return this.seconds ? (this.ids.length - this.firstTokens) / this.seconds : null;
  }

  get firstTokens() {
    const [first] = this.passes;
    return first.draft + first.bonus + first.plain;
  }

  // Passes with drafts. The response counts those too for which the drafter had none to offer.
  get rounds() {
    return this.spec ? this.spec.rounds : this.passes.filter((pass) => pass.draft + pass.bonus).length;
  }

  get tau() {
    if (this.spec) return this.spec.tau;
    return this.rounds ? (this.counts.draft + this.counts.bonus) / this.rounds : null;
  }

  figures() {
    return {
      tau: shown(this.tau, 2),
      rounds: shown(this.passes.length ? this.rounds : null, 0),
      passes: shown(this.passes.length || null, 0),
      speed: shown(this.speed, 1),
      first: this.firstAt === null ? "–" : `${shown((this.firstAt - this.startedAt) / 1000, 2)} s`,
    };
  }

  // -- what is seen ---------------------------------------------------------------------------------------------------

  addPass(tokens) {
    const pass = { draft: 0, bonus: 0, plain: 0 };
    const group = document.createElement("span");
    group.className = "pass";
    for (const token of tokens) {
      pass[token.origin] += 1;
      this.counts[token.origin] += 1;
      this.ids.push(token.id);
      this.text += token.text;
      group.append(this.tokenSpan(token, pass));
    }
    this.passes.push(pass);
    this.answer.append(group);
  }

  tokenSpan(token, pass) {
    const span = document.createElement("span");
    span.className = `token ${token.origin}`;
    span.classList.toggle("blank", /^\n+$/.test(token.text));
    span.textContent = token.text;
    span.dataset.id = token.id;
    span.dataset.origin = token.origin;
    const place = token.origin === "draft" ? ` ${pass.draft}` : "";
    span.dataset.about = `${JSON.stringify(token.text)}  id ${token.id}\n${WORDS[token.origin]}${place}, pass ${this.passes.length + 1}`;
    return span;
  }

  paintSoon() {
    this.frame ??= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    const figures = this.figures();
    for (const cell of this.root.querySelectorAll("[data-figure]")) cell.textContent = figures[cell.dataset.figure];
    for (const cell of this.root.querySelectorAll("[data-count]")) cell.textContent = this.counts[cell.dataset.count];
    this.followText();
    this.draw();
    this.beside?.draw();
  }

  // Keeps the newest text in sight, unless somebody scrolled up to read.
  followText() {
    const { scrollTop, clientHeight, scrollHeight } = this.answer;
    if (scrollTop + clientHeight >= this.seenHeight - 8) this.answer.scrollTop = scrollHeight;
    this.seenHeight = scrollHeight;
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.chart;
    const ratio = window.devicePixelRatio || 1;
    this.chart.width = width * ratio; // also wipes it
    this.chart.height = height * ratio;
    const pen = this.chart.getContext("2d");
    pen.scale(ratio, ratio);
    const colours = getComputedStyle(this.chart);
    const column = Math.min(MOST_COLUMN_PX, width / Math.max(1, this.passes.length, this.beside?.passes.length ?? 0));
    const gap = column > 3 ? 1 : 0; // narrower columns would be mostly gaps
    const rows = Math.max(LEAST_ROWS, ...this.passes.map((pass) => pass.draft + pass.bonus + pass.plain));
    const row = height / rows;
    this.passes.forEach((pass, i) => {
      let filled = 0;
      for (const origin of ["draft", "bonus", "plain"]) {
        pen.fillStyle = colours.getPropertyValue(`--${origin}-line`);
        for (let block = 0; block < pass[origin]; block++, filled++)
          pen.fillRect(i * column, height - (filled + 1) * row + 1, column - gap, row - 1);
      }
    });
    const { draft, bonus, plain } = this.counts;
    this.chart.setAttribute(
      "aria-label",
      `${this.passes.length} passes of the target gave ${draft} accepted drafts, ${bonus} bonus and ${plain} plain tokens`,
    );
  }

  // -- details of a token ---------------------------------------------------------------------------------------------

  watchTokens(tip) {
    const show = (token) => {
      this.current?.classList.remove("current");
      this.current = token;
      tip(token);
      token?.classList.add("current");
    };
    this.answer.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
    this.answer.addEventListener("pointerleave", () => show(null));
    this.answer.addEventListener("blur", () => show(null));
    this.answer.addEventListener("keydown", (event) => {
      const tokens = [...this.answer.querySelectorAll(".token")];
      const at = tokens.indexOf(this.current);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1, Escape: -1 }[event.key];
      if (next === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const token = event.key === "Escape" ? null : tokens[Math.max(0, Math.min(next, tokens.length - 1))];
      token?.scrollIntoView({ block: "nearest" });
      show(token ?? null);
    });
  }
}

export function shown(number, digits) {
  return number === null ? "–" : number.toFixed(digits);
}
