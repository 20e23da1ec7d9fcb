/** Files that the user attaches: pictures as data URLs, everything else as text. */

/** @typedef {import("./conversation.js").TextFile} TextFile */

// Models see at most about 2,000 pixels a side; a smaller picture is sent and stored much faster.
const MAX_SIDE = 2048;
const MAX_TEXT = 2_000_000;

/**
 * Reads files that were chosen, dropped or pasted.
 * @param {Iterable<File>} files
 * @param {boolean} readsPictures whether the model reads pictures; else they are errors
 * @returns {Promise<{images: string[], texts: TextFile[], errors: string[]}>}
 */
export async function readFiles(files, readsPictures) {
  /** @type {{images: string[], texts: TextFile[], errors: string[]}} */
  const read = { images: [], texts: [], errors: [] };
  for (const file of files) {
    try {
      const picture = file.type.startsWith("image/") && !file.type.includes("svg");
      if (picture && !readsPictures) throw new Error("the chosen model reads no pictures");
      if (picture) read.images.push(await readImage(file));
      else read.texts.push(await readText(file));
    } catch (error) {
      read.errors.push(`${file.name}: ${error instanceof Error ? error.message : error}`);
    }
  }
  return read;
}

/** @param {File} file */
async function readImage(file) {
  /** @type {ImageBitmap} */
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("this picture cannot be read; use PNG, JPEG, WebP or GIF");
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92);
}

/** @param {File} file */
async function readText(file) {
  if (file.size > MAX_TEXT) throw new Error("larger than 2 MB");
  const bytes = new Uint8Array(await file.arrayBuffer());
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error("binary");
    return { name: file.name, text };
  } catch {
    throw new Error("this is neither a picture nor text in UTF-8");
  }
}
