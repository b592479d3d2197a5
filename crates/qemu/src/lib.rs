//! QEMU as it is: migration streams read and written, QMP, and the gateway beside an unmodified QEMU.
