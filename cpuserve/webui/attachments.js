/** Files that the user attaches: pictures and PDF documents as data URLs, everything else as text. */

/**
 * @typedef {import("./conversation.js").TextFile} TextFile
 * @typedef {import("./conversation.js").Seen} Seen
 * @typedef {import("./conversation.js").PdfFile} PdfFile
 * @typedef {import("./conversation.js").Part} Part
 * @typedef {{url: string, seen: Seen}} Picture
 * @typedef {{images: Picture[], documents: PdfFile[], files: TextFile[]}} Attached
 *
 * Returns what the server makes of a part: the size and the tokens of each picture, or of each page; [] if it
 * does not say. An error says why it refuses the part.
 * @typedef {(part: Part) => Promise<Seen[]>} Measure
 */

// Models see at most about 2,000 pixels a side; a smaller picture is sent and stored much faster.
const MAX_SIDE = 2048;
const MAX_TEXT = 2_000_000;
// The server accepts no larger files, and a browser decodes no picture of more bytes in good time.
const MAX_BYTES = 32 << 20;
const PDF = "application/pdf";

/**
 * Reads files that were chosen, dropped or pasted.
 * @param {Iterable<File>} files
 * @param {boolean} readsPictures whether the model reads pictures; else they are errors
 * @param {Measure} measure
 * @returns {Promise<Attached & {errors: string[]}>}
 */
export async function readFiles(files, readsPictures, measure) {
  /** @type {Attached & {errors: string[]}} */
  const read = { images: [], documents: [], files: [], errors: [] };
  for (const file of files) {
    try {
      const isPicture = file.type.startsWith("image/") && !file.type.includes("svg");
      const isDocument = file.type === PDF || /\.pdf$/i.test(file.name);
      if (isPicture && !readsPictures) throw new Error("the chosen model reads no pictures");
      if (isDocument && !readsPictures) throw new Error("the chosen model reads no PDF documents; attach their text");
      if ((isPicture || isDocument) && file.size > MAX_BYTES) throw new Error("larger than 32 MB");
      if (isPicture) read.images.push(await readImage(file, measure));
      else if (isDocument) read.documents.push(await readDocument(file, measure));
      else read.files.push(await readText(file));
    } catch (error) {
      read.errors.push(`${file.name}: ${error instanceof Error ? error.message : error}`);
    }
  }
  return read;
}

/**
 * @param {File} file
 * @param {Measure} measure
 * @returns {Promise<Picture>}
 */
async function readImage(file, measure) {
  /** @type {ImageBitmap} */
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("this picture cannot be read; use PNG, JPEG, WebP or GIF");
  }
  const { width, height } = bitmap;
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const url = canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92);
  const [seen] = await measure(imagePart(url));
  return { url, seen: { ...seen, width, height } };
}

/**
 * @param {File} file
 * @param {Measure} measure
 * @returns {Promise<PdfFile>}
 */
async function readDocument(file, measure) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("this file cannot be read"));
    reader.readAsDataURL(file.slice(0, file.size, PDF));
  });
  const pages = await measure(documentPart({ name: file.name, url }));
  const known = pages.length ? { pages: pages.length, tokens: sum(pages.map((page) => page.tokens ?? 0)) } : {};
  return { name: file.name, url, ...known };
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
    throw new Error("this is neither a picture, nor PDF, nor text in UTF-8");
  }
}

/**
 * @param {string} url
 * @returns {Part}
 */
export function imagePart(url) {
  return { type: "image_url", image_url: { url } };
}

/**
 * @param {PdfFile} document
 * @returns {Part}
 */
export function documentPart({ name, url }) {
  return { type: "file", file: { filename: name, file_data: url } };
}

/**
 * Returns the size of a picture and its tokens as a text; "" if nothing is known.
 * @param {Seen | undefined} seen
 */
export function pictureText(seen) {
  if (!seen) return "";
  const { width, height, used_width = width, used_height = height } = seen;
  // The server says the same of pictures in `usage`: small text may be lost.
  const small = 2 * used_width < width || 2 * used_height < height;
  const parts = [`${width} × ${height}`, small && `read at ${used_width} × ${used_height}`, tokenText(seen.tokens)];
  return parts.filter(Boolean).join(" · ");
}

/**
 * Returns the pages of a document and their tokens as a text; "" if nothing is known.
 * @param {PdfFile} document
 */
export function documentText({ pages, tokens }) {
  if (!pages) return "";
  return [`${pages} ${pages === 1 ? "page" : "pages"}`, tokenText(tokens)].filter(Boolean).join(" · ");
}

/** @param {number | undefined} tokens */
const tokenText = (tokens) => (tokens ? `${tokens.toLocaleString("en")} tokens` : "");

/** @param {number[]} numbers */
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
