import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILSPCodeExtractorsManager } from '@jupyterlab/lsp';

import { asPython, isOurs } from '../python';

/**
 * Language servers (jupyterlab-lsp, where it is installed) read the body of our cells as Python, and know what
 * the first line binds. An extractor of foreign code is JupyterLab's own seam for this, and works before
 * jupyterlab-lsp's rule that hides every `%%` cell; ours extracts nothing, and gives the host's code anew.
 */
export const lsp: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:lsp',
  description: 'Lets language servers read %%trace and %%edit cells as Python.',
  autoStart: true,
  optional: [ILSPCodeExtractorsManager],
  activate: (_: JupyterFrontEnd, extractors: ILSPCodeExtractorsManager | null) => {
    extractors?.register(
      {
        language: 'python',
        cellType: ['code'],
        standalone: false,
        fileExtension: 'py',
        hasForeignCode: isOurs,
        extractForeignCode: code => [{ hostCode: asPython(code), foreignCode: null, range: null, virtualShift: null }]
      },
      'python'
    );
  }
};
