/** Files that the user attaches: pictures, PDF and Word documents as data URLs, everything else as text. */

/**
 * @typedef {import("./conversation.js").TextFile} TextFile
 * @typedef {import("./conversation.js").Seen} Seen
 * @typedef {import("./conversation.js").Part} Part
 * @typedef {import("./conversation.js").DocumentFile} DocumentFile
 * @typedef {{url: string, seen: Partial<Seen>}} Picture
 * @typedef {{images: Picture[], documents: DocumentFile[], files: TextFile[]}} Attached
 * @typedef {{list: keyof Attached, value: Picture | DocumentFile | TextFile}} Item
 *
 * Returns what the server makes of a part: the size and the tokens of each picture, or of each page, and about
 * how many tokens its text has; 0 and [] if it does not say. An error says why it refuses the part.
 * @typedef {(part: Part) => Promise<{pictures: Seen[], tokens: number}>} Measure
 */

// Models see at most about 2,000 pixels a side; a smaller picture is sent and stored much faster.
const MAX_SIDE = 2048;
const MAX_TEXT = 2_000_000;
// The server accepts no larger files, and a browser decodes no picture of more bytes in good time.
const MAX_BYTES = 32 << 20;
const TIFF = "image/tiff";
const PDF = "application/pdf";
const DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document";
const DOCUMENTS = [PDF, DOCX];
/** @type {Record<string, string>} */
const TYPES = { pdf: PDF, docx: DOCX, tif: TIFF, tiff: TIFF };

/**
 * Reads a file that was chosen, dropped or pasted. What the server says of it comes later (`measured`).
 * @param {File} file
 * @param {boolean} readsPictures whether the model reads pictures; else they are errors
 * @returns {Promise<Item>}
 */
export async function readFile(file, readsPictures) {
  const type = typeOf(file);
  const isPicture = type.startsWith("image/") && !type.includes("svg");
  if (isPicture && !readsPictures) throw new Error("the chosen model reads no pictures");
  if (!isPicture && !DOCUMENTS.includes(type)) return { list: "files", value: await readText(file) };
  if (file.size > MAX_BYTES) throw new Error("larger than 32 MB");
  if (isPicture) return { list: "images", value: await readImage(file, type) };
  return { list: "documents", value: { name: file.name, url: await dataUrl(file, type) } };
}

/**
 * Returns what the server says of the size of a picture or a document; an error says why it refuses the file.
 * @param {Item} item
 * @param {Measure} measure
 * @returns {Promise<object>} the members of its value that change
 */
export async function measured({ list, value }, measure) {
  if (list === "files") return {};
  if (list === "images") {
    const { url, seen } = /** @type {Picture} */ (value);
    const [told] = (await measure(imagePart(url))).pictures;
    return { seen: { ...told, ...seen } };
  }
  const { pictures, tokens } = await measure(documentPart(/** @type {DocumentFile} */ (value)));
  if (!pictures.length) return tokens ? { tokens } : {};
  return { pages: pictures.length, tokens: sum(pictures.map((page) => page.tokens ?? 0)) };
}

/**
 * Returns the media type of a file; some systems do not know those of all files.
 * @param {File} file
 */
function typeOf({ type, name }) {
  const end = /\.(\w+)$/.exec(name.toLowerCase())?.[1] ?? "";
  return TYPES[end] ?? type;
}

/**
 * @param {File} file
 * @param {string} type
 * @returns {Promise<Picture>}
 */
async function readImage(file, type) {
  /** @type {ImageBitmap} */
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    // The server reads this format, which browsers do not show.
    if (type === TIFF) return { url: await dataUrl(file, type), seen: {} };
    throw new Error("this picture cannot be read; use PNG, JPEG, WebP, GIF or TIFF");
  }
  const { width, height } = bitmap;
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const url = canvas.toDataURL(type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92);
  return { url, seen: { width, height } };
}

/**
 * @param {File} file
 * @param {string} type
 * @returns {Promise<string>}
 */
function dataUrl(file, type) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("this file cannot be read"));
    reader.readAsDataURL(file.slice(0, file.size, type));
  });
}

/** @param {File} file */
async function readText(file) {
  if (file.size > MAX_TEXT) throw new Error("larger than 2 MB");
  const text = decoded(new Uint8Array(await file.arrayBuffer()));
  // Texts have no control characters besides those of lines, tabs, pages and colors.
  if (/[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]/.test(text)) {
    throw new Error("this is neither a picture, nor a PDF or Word document, nor text");
  }
  return { name: file.name, text };
}

/**
 * Returns a text in UTF-8, in UTF-16 with its mark, or in Latin-1 as Windows writes it.
 * @param {Uint8Array} bytes
 */
function decoded(bytes) {
  const [first, second] = bytes;
  if ((first === 0xff && second === 0xfe) || (first === 0xfe && second === 0xff)) {
    return new TextDecoder(first === 0xff ? "utf-16le" : "utf-16be").decode(bytes);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
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
 * @param {DocumentFile} document
 * @returns {Part}
 */
export function documentPart({ name, url }) {
  return { type: "file", file: { filename: name, file_data: url } };
}

/**
 * Returns the size of a picture and its tokens as a text; "" if nothing is known.
 * @param {Partial<Seen> | undefined} seen
 */
export function pictureText(seen) {
  if (!seen?.width || !seen.height) return "";
  const { width, height, used_width = width, used_height = height } = seen;
  // The server says the same of pictures in `usage`: small text may be lost.
  const small = 2 * used_width < width || 2 * used_height < height;
  const parts = [`${width} × ${height}`, small && `read at ${used_width} × ${used_height}`, tokenText(seen.tokens)];
  return parts.filter(Boolean).join(" · ");
}

/**
 * Returns the pages of a document and their tokens as a text; "" if nothing is known.
 * @param {DocumentFile} document
 */
export function documentText({ pages, tokens }) {
  const counted = pages ? `${pages} ${pages === 1 ? "page" : "pages"}` : "text";
  return pages || tokens ? [counted, tokenText(tokens)].filter(Boolean).join(" · ") : "";
}

/**
 * Returns the size of a text as a text.
 * @param {TextFile} file
 */
export function textSize({ text }) {
  const size = text.length;
  return size < 1000 ? `${size} characters` : `${Math.round(size / 1000).toLocaleString("en")} k characters`;
}

/** @param {number | undefined} tokens */
const tokenText = (tokens) => (tokens ? `${tokens.toLocaleString("en")} tokens` : "");

/** @param {number[]} numbers */
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
