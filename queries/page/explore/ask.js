// Questions to the server, and their answers: a header and arrays of numbers.

const STORED_TOKEN = "headcount-token";
let offered = null;

// The token comes in the fragment, which no browser sends, and leaves it at once: `hash` stands there
// instead. Once the server has taken it, it is kept for this host and port, so that a bookmark opens
// in any tab. A cookie would go to every port of the host.
export function takeToken(hash = "") {
  if (!/^#[\w-]{20,}$/.test(location.hash)) return false;
  offered = location.hash.slice(1);
  history.replaceState(null, "", hash || location.pathname);
  return true;
}

const ARRAYS = { "<u4": Uint32Array, "<f8": Float64Array };
let open = 0;
let sent = 0;

// Tests and screen readers see whether the page waits.
function count(change) {
  open += change;
  if (change > 0) sent += 1;
  document.body.dataset.sent = sent;
  document.body.ariaBusy = open > 0;
}

export const isWaiting = () => open > 0;

function unpacked(body) {
  const headerBytes = new DataView(body).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, headerBytes)));
  let at = 4 + headerBytes;
  header.arrays = header.arrays.map(([type, shape]) => {
    const length = shape.reduce((product, size) => product * size, 1);
    const array = new ARRAYS[type](body, at, length);
    at += Math.ceil(array.byteLength / 8) * 8;
    return array;
  });
  return header;
}

// Ask a query. An answer that says no is an Error with one line.
export async function ask(query, signal) {
  count(1);
  try {
    const token = offered ?? localStorage.getItem(STORED_TOKEN) ?? "";
    const response = await fetch("/ask", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(query),
    });
    document.body.classList.toggle("locked", response.status === 401);
    if (response.status === 401) offered = null; // A wrong one does not replace the one that is kept.
    else if (token === offered) localStorage.setItem(STORED_TOKEN, offered);
    if (!response.ok) throw new Error((await response.json()).error);
    return unpacked(await response.arrayBuffer());
  } catch (error) {
    if (error instanceof TypeError) throw new Error("the explorer does not answer: it may have ended");
    throw error;
  } finally {
    count(-1);
  }
}
