//! QEMU's stream and its control socket: recorded, hostile and real.

mod control_real_qemu;
mod live_control_real_qemu;
mod stream_golden;
mod stream_hostile;
mod stream_real_qemu;
mod stream_round_trip;
mod stream_support;
