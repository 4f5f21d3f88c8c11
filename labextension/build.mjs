// Bundles each widget's module into one file that the Python package ships.
import { build } from 'esbuild';

const WIDGETS = ['heatmap', 'browser', 'strip', 'token_strip', 'lens', 'attention'];
const target = '../nnsight_lab/widgets/static';

await build({
  entryPoints: WIDGETS.flatMap(name => [`src/widgets/${name}.ts`, `src/widgets/${name}.css`]),
  outdir: target,
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  charset: 'utf8',
  logLevel: 'warning'
});
