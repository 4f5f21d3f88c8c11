// Builds what the Python package ships: each widget's module, one file; and the JupyterLab extension, a federated
// module that shares JupyterLab's own packages. `--watch` builds again whenever a source changes, until it is told to
// end or what started it is gone; a stop of JupyterLab by Ctrl+C, which asks first, is not meant for it. What it builds
// is larger and has source maps: a mark is left, so that it is not taken for what is shipped.
import { spawn } from 'node:child_process';
import { copyFile, mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import { context } from 'esbuild';

const WIDGETS = ['heatmap', 'browser', 'strip', 'token_strip', 'lens', 'attention'];
const EXTENSION = '../nnsight_lab/labextension';
const BUILDER = 'node_modules/@jupyter/builder/lib/build-labextension.js';
const CORE = 'node_modules/.cache/nnsight-lab/core.json';
const DEVELOPMENT = 'node_modules/.cache/nnsight-lab/development';
const watch = process.argv.includes('--watch');

const widgets = await context({
  entryPoints: WIDGETS.flatMap(name => [`src/widgets/${name}.ts`, `src/widgets/${name}.css`]),
  outdir: '../nnsight_lab/widgets/static',
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  charset: 'utf8',
  logLevel: 'warning'
});

// The builder asks for the JupyterLab it was released with; we work with every one that package.json names.
const ours = JSON.parse(await readFile('package.json', 'utf8'));
const core = JSON.parse(await readFile('node_modules/@jupyterlab/core-meta/core.package.json', 'utf8'));
for (const [name, range] of Object.entries(ours.dependencies)) {
  core.dependencies[name] = core.resolutions[name] = range;
}
await mkdir(CORE.replace(/[^/]*$/, ''), { recursive: true });
await writeFile(CORE, JSON.stringify(core));

const extension = spawn(
  process.execPath,
  [BUILDER, ...(watch ? ['--development', '--watch'] : []), '--core-package-file', CORE, '.'],
  { stdio: 'inherit', detached: watch }
);
const ended = new Promise(resolve => extension.on('exit', resolve));

if (watch) {
  const end = () => extension.kill();
  process.on('SIGINT', () => {});
  process.on('SIGTERM', end);
  const parent = process.ppid;
  setInterval(() => process.ppid !== parent && end(), 1000).unref();
  await writeFile(DEVELOPMENT, '');
  await widgets.watch();
  process.exitCode = (await ended) ?? 1;
} else {
  await widgets.rebuild();
  process.exitCode = (await ended) ?? 1;
  if (process.exitCode === 0) {
    await copyFile('install.json', `${EXTENSION}/install.json`);
    await rm(DEVELOPMENT, { force: true });
  }
}
await widgets.dispose();
