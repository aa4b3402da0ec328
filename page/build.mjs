// Builds the page that `weft serve` answers at /: node build.mjs [FOLDER].
// The same sources and package-lock.json give the same bytes on every machine.
import { build } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2] ?? join(here, "../weft/data/page");

await mkdir(folder, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: folder,
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "iife",
  target: ["es2022", "chrome109", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  banner: { js: "/* Built from page/ by `make page`. Licences: LICENSES.txt */", css: "/* Built from page/ by `make page`. */" },
  logLevel: "info",
});
await writeFile(join(folder, "index.html"), await readFile(join(here, "src/index.html")));

const notices = [];
for (const name of ["preact", "@preact/signals", "@preact/signals-core"]) {
  const about = join(here, "node_modules", name);
  const { version } = JSON.parse(await readFile(join(about, "package.json"), "utf8"));
  notices.push(`${name} ${version}\n\n${(await readFile(join(about, "LICENSE"), "utf8")).trim()}\n`);
}
await writeFile(join(folder, "LICENSES.txt"), notices.join(`\n${"-".repeat(80)}\n\n`));
