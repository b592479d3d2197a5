//! What runs a guest's instructions: emulation or KVM.

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// KVM if a probe shows that it runs the guest, else TCG. `STERNA_ACCEL=kvm|tcg` in the environment overrides this.
    Auto,
    /// KVM.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Accel {
    /// Returns QEMU's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
            Accel::Auto => "auto",
        }
    }
}
