//! QEMU as it is: migration streams read and written, QMP, and the gateway beside an unmodified QEMU.
pub mod discover;
pub mod gateway;
pub mod placement;
pub mod qmp;
pub mod settings;
pub mod stream;
