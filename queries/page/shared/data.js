// The data of a page that is one file: compressed JSON in base64, in the element "data".
export async function pageData() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) =>
    c.charCodeAt(0),
  );
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
