/** The words and records between a kernel and this panel: mirrors of `nnsight_lab/wire/panel.py`, which a test compares. */

export const PROTOCOL = 1;

export const STATUS_REQUEST = 'nnsight_lab_status_request';
export const STATUS_REPLY = 'nnsight_lab_status_reply';
export const ACTION_REQUEST = 'nnsight_lab_action_request';
export const ACTION_REPLY = 'nnsight_lab_action_reply';
export const COMM_TARGET = 'nnsight_lab_panel';
export const VISIBLE = 'visible';
export const EVERY_S = 'every_s';
export const SAVES = 'saves';

export const STARTING = 'starting';
export const READY = 'ready';
export const BUSY = 'busy';
export const ASLEEP = 'asleep';
export const DEAD = 'dead';
export const STOPPED = 'stopped';

export const ACTION = 'action';
export const CHECK = 'check';
export const START = 'start';
export const RESTART = 'restart';
export const STOP = 'stop';
export const SLEEP = 'sleep';
export const WAKE = 'wake';
export const INTERRUPT = 'interrupt';
export const LOG = 'log';
export const EDIT_ON = 'edit_on';
export const EDIT_OFF = 'edit_off';
export const EDIT_CLEAR = 'edit_clear';
export const EDIT_DEFAULT = 'edit_default';
export const EDITS = 'edits';
export const END_ORPHAN = 'end_orphan';
export const FORECAST = 'forecast';
export const CELL = 'cell';

export const PROMPT = 'a prompt';
export const FIRST = 'the first step with a block';

export const RUNNING = 'running';
export const DONE = 'done';
export const FAILED = 'failed';

export interface PanelEdit {
  name: string;
  version: number;
  on: boolean;
  source: string;
  previous_source: string;
  cell_id: string;
  cell_source: string;
  owner: string;
  hits: number;
  errors: number;
  last_error: string;
}

export interface PanelReason {
  why: string;
  asker: string;
  steps: number;
}

export interface PanelSteps {
  known: boolean;
  graphs: boolean;
  on_cpu: boolean;
  replayed: number;
  tapped: number;
  by_module: number;
  reasons: PanelReason[];
}

export interface PanelEngine {
  name: string;
  state: string;
  current: boolean;
  model: string;
  mode: string;
  phase: string;
  phase_s: number;
  options: string[];
  waiting: number;
  running: number;
  tokens_per_s: number;
  kv_used: number;
  saves_bytes: number;
  saves_disk_bytes: number;
  saves_budget_bytes: number;
  saves_requests: number;
  up_s: number;
  idle_s: number;
  pids: number[];
  memory_bytes: number;
  gpu_bytes: number;
  log: string;
  cause: string;
  no_sleep: string;
  attach: string;
  chooses_edits: boolean;
  default_edits: string[];
  edits: PanelEdit[];
  steps: PanelSteps;
}

export interface PanelSave {
  engine: string;
  request_id: string;
  block: string;
  name: string;
  step: number;
  kind: string;
  shape: number[];
  dtype: string;
  bytes: number;
  prompt: string;
  created: number;
  code: string;
}

export interface PanelGpuProcess {
  pid: number;
  owner: string;
  bytes: number;
  ours: boolean;
  engine: string;
}

export interface PanelGpu {
  index: number;
  name: string;
  used_bytes: number;
  total_bytes: number;
  processes: PanelGpuProcess[];
}

export interface PanelOrphan {
  engine: string;
  pids: number[];
  memory_bytes: number;
  gpu_bytes: number;
  log: string;
}

export interface PanelAction {
  id: number;
  action: string;
  engine: string;
  state: string;
  text: string;
}

export interface PanelForecast {
  saves: number;
  of_edits: number;
  requests: number;
  bytes: number;
  token_bytes: number;
  at_most: boolean;
  at_least: boolean;
  each_step: boolean;
}

export interface PanelStatus {
  protocol: number;
  version: string;
  pid: number;
  importing_s: number;
  gpus: number;
  devices: PanelGpu[];
  engines: PanelEngine[];
  orphans: PanelOrphan[];
  actions: PanelAction[];
  models: string[];
  with_saves: boolean;
  saves: PanelSave[];
}
