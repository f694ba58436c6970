// The data of a page that is one file: compressed JSON in base64, in the element "data".
export async function pageData() {
  const text = atob(document.getElementById("data").textContent);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
