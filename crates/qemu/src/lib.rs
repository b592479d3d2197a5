//! Everything about QEMU: its migration streams, QMP, its settings and guest RAM, and the gateway beside an unmodified QEMU.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
pub mod discover;
pub mod gateway;
pub mod libvirt;
pub mod placement;
pub mod qmp;
pub mod settings;
pub mod stream;
mod vcpus;
