/** The words and records between the Jupyter server and this panel: mirrors of `nnsight_lab/wire/machine.py`, which a test compares. */

export const PROTOCOL = 1;

export const ROUTE = 'nnsight-lab/api';
export const STATUS = 'status';
export const LOG = 'log';
export const ENGINE = 'engine';
export const ORPHANS = 'orphans';
export const END = 'end';

export const KERNEL = 'kernel';
export const ORPHAN = 'orphan';
export const KEPT = 'kept';

export interface MachineEngine {
  engine: string;
  kind: string;
  name: string;
  model: string;
  owner_pid: number;
  kernel_id: string;
  pids: number[];
  memory_bytes: number;
  gpu_bytes: number;
  age_s: number;
  log: string;
  attach: string;
}

export interface MachineGpuProcess {
  pid: number;
  used_bytes: number;
  owner: string;
  engine: string;
}

export interface MachineGpu {
  index: number;
  name: string;
  used_bytes: number;
  total_bytes: number;
  busy: number;
  processes: MachineGpuProcess[];
}

export interface MachineStatus {
  protocol: number;
  version: string;
  host: string;
  user: string;
  engines: MachineEngine[];
  gpus: MachineGpu[];
  gpus_trouble: string;
}

export interface MachineAnswer {
  ok: boolean;
  text: string;
}
