/** Who holds the memory of each GPU, as far as the driver and the system tell. */
import { element, say } from '../../widgets/dom';
import { Keyed } from '../keyed';
import type { PanelGpu, PanelGpuProcess } from '../wire';
import { bytes } from '../words';
import type { Context } from './context';

export class GpusView {
  readonly element: HTMLElement;
  readonly #gpus: Keyed<PanelGpu>;

  constructor(readonly context: Context) {
    const { trans } = context;
    const list = element('div', {});
    this.element = element('section', { class: 'nnlab-gpus', 'aria-label': trans.__('GPU memory') }, element('h4', {}, trans.__('GPU memory')), list);
    this.#gpus = new Keyed(
      list,
      gpu => String(gpu.index),
      gpu => this.#make(gpu)
    );
  }

  update(gpus: readonly PanelGpu[]): void {
    this.element.hidden = gpus.length === 0;
    this.#gpus.show(gpus);
  }

  #make(first: PanelGpu): { element: HTMLElement; update: (gpu: PanelGpu) => void } {
    const { trans } = this.context;
    const title = element('p', {});
    const bar = element('span', { class: 'nnlab-bar', 'aria-hidden': 'true' }, element('span', {}));
    const list = element('ul', { class: 'nnlab-list', 'aria-label': trans.__('Processes on GPU %1', first.index) });
    const processes = new Keyed<PanelGpuProcess>(
      list,
      process => String(process.pid),
      () => {
        const who = element('span', {});
        const size = element('span', {});
        const item = element('li', { class: 'nnlab-gpu-process' }, who, size);
        return {
          element: item,
          update: process => {
            item.classList.toggle('nnlab-faint', !process.ours);
            say(who, this.#who(process));
            say(size, process.bytes < 0 ? trans.__('not told') : bytes(process.bytes, trans));
          }
        };
      }
    );
    return {
      element: element('div', { class: 'nnlab-gpu' }, title, bar, list),
      update: gpu => {
        say(title, trans.__('GPU %1, %2: %3 of %4', gpu.index, gpu.name, bytes(gpu.used_bytes, trans), bytes(gpu.total_bytes, trans)));
        (bar.firstElementChild as HTMLElement).style.width = `${gpu.total_bytes ? (gpu.used_bytes / gpu.total_bytes) * 100 : 0}%`;
        processes.show(gpu.processes);
      }
    };
  }

  #who(process: PanelGpuProcess): string {
    const { trans } = this.context;
    const owner = process.owner || trans.__('owner not told');
    const mine = process.engine ? trans.__(', engine %1', process.engine) : process.ours ? trans.__(', an engine of yours') : '';
    return trans.__('%1, process %2', owner, process.pid) + mine;
  }
}
