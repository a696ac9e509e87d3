"use strict";
// The map of the block pool: one small square per block, coloured by owner.

const OWNERS = ["free", "cached", "held", "shared"];
const OWNER_TEXTS = ["free", "free, holds a cached prefix", "held by one sequence", "shared by several sequences"];

class PoolMap {
  constructor() {
    this.canvas = byId("blocks");
    this.readout = byId("blocks-readout");
    this.cells = "";
    this.layout = null;
    this.hover = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.point(null, null));
  }

  /** `blocks`: {cells, per_cell, counts}; `blockSize`: slots of a block. */
  draw(blocks, blockSize) {
    Object.assign(this, { cells: blocks.cells, perCell: blocks.per_cell, counts: blocks.counts, blockSize });
    byId("blocks-empty").hidden = this.cells.length > 0;
    blocks.counts.forEach((count, owner) => setText(byId(`blocks-${owner}`), this.cells ? compact(count) : ""));
    const { pen, width, height } = prepareCanvas(this.canvas);
    if (!this.cells) return;
    this.layout = this.arrange(width, height);
    const { pitch, size, columns } = this.layout;
    OWNERS.forEach((owner, code) => {
      pen.fillStyle = colour(owner);
      for (let i = this.cells.indexOf(code); i >= 0; i = this.cells.indexOf(code, i + 1)) {
        pen.fillRect((i % columns) * pitch, Math.floor(i / columns) * pitch, size, size);
      }
    });
    this.canvas.setAttribute("aria-label", `Block pool: ${OWNERS.map((o, i) => `${blocks.counts[i]} ${o}`).join(", ")}`);
    this.describe();
  }

  /** The largest squares with which all cells fit. */
  arrange(width, height) {
    for (let pitch = 18; pitch > 2; pitch -= 1) {
      const columns = Math.floor(width / pitch);
      if (Math.ceil(this.cells.length / columns) * pitch <= height || pitch === 3) {
        return { pitch, columns, size: pitch > 6 ? pitch - 2 : pitch - 1 };
      }
    }
    throw new Error("unreachable");
  }

  point(x, y) {
    this.hover = null;
    if (x !== null && this.layout) {
      const { pitch, columns } = this.layout;
      const column = Math.floor(x / pitch), cell = Math.floor(y / pitch) * columns + column;
      if (column < columns && cell < this.cells.length) this.hover = cell;
    }
    this.describe();
  }

  describe() {
    const first = 1 + (this.hover ?? 0) * this.perCell;
    let text = `${plural(this.counts.reduce((a, b) => a + b, 0), "block")} of ${this.blockSize} tokens`;
    if (this.perCell > 1) text += ` · one square: ${this.perCell} blocks, coloured by the most common owner`;
    if (this.hover !== null) {
      const name = this.perCell > 1 ? `Blocks ${first} to ${first + this.perCell - 1}: mostly ` : `Block ${first}: `;
      text = name + OWNER_TEXTS[this.cells[this.hover]];
    }
    setText(this.readout, text);
  }
}
