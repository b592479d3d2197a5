//! Selects the vector instructions that this process uses.
//!
//! One selection, made once, for scan, compare, delta and snapshot: the best of this CPU, unless `STERNA_CPU` limits
//! it. The variable is for tests and for finding out whether a wrong result comes from a vector unit; it never selects
//! instructions that the CPU does not have.

use std::sync::LazyLock;

/// A set of instructions in which the loops over guest memory are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// 64-bit words, on every CPU.
    Scalar,
    /// 256-bit vectors of x86-64.
    Avx2,
    /// 512-bit vectors of x86-64 (AVX-512F), beside which narrower ones are used too.
    Avx512,
    /// 128-bit vectors of aarch64, which every such CPU has.
    Neon,
}

/// The selection.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    /// The implementations that may run, the simplest first.
    available: Vec<Implementation>,
    chosen: Implementation,
    /// A warning about the value of `STERNA_CPU`.
    warning: Option<String>,
}

static CHOICE: LazyLock<Choice> = LazyLock::new(|| {
    let wanted = std::env::var_os("STERNA_CPU").map(|value| value.to_string_lossy().into_owned());
    let choice = choose(wanted.as_deref(), detected());
    if let Some(warning) = &choice.warning {
        tracing::warn!("{warning}");
    }
    choice
});

impl Implementation {
    /// Returns every implementation that may run here, the simplest first; the scalar one always.
    ///
    /// These are the CPU's, up to the one that the environment variable `STERNA_CPU` (`scalar`, `avx2`, `avx512`,
    /// `neon`) names, if it is set. The variable is read once. A value that is unknown, or that this CPU does not have,
    /// is ignored with a warning.
    pub fn available() -> &'static [Self] {
        &CHOICE.available
    }

    /// Returns the implementation in use: the one `STERNA_CPU` names, else the best available.
    ///
    /// AVX2 is preferred to AVX-512 for code that only reads memory: where it was measured (Zen 4,
    /// `examples/memory_throughput.rs`) the wider one was no faster, and on some older CPUs 512-bit vectors lower the
    /// clock.
    pub fn chosen() -> Self {
        CHOICE.chosen
    }

    /// Returns its name, as in `STERNA_CPU`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }
}

/// Returns the warning that `STERNA_CPU` is ignored, and why.
pub fn warning() -> Option<&'static str> {
    CHOICE.warning.as_deref()
}

/// Prefetches the cache line at `ptr`. Never faults, whatever the address.
#[inline(always)]
pub(crate) fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that a program sees; SSE is part of the target.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch reads nothing that a program sees.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{ptr}]", ptr = in(reg) ptr, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = ptr;
}

/// Returns the implementations of the CPU, the simplest first.
fn detected() -> Vec<Implementation> {
    let extra: &[(bool, Implementation)] = &[
        #[cfg(target_arch = "x86_64")]
        (is_x86_feature_detected!("avx2"), Implementation::Avx2),
        #[cfg(target_arch = "x86_64")]
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2"), Implementation::Avx512),
        #[cfg(target_arch = "aarch64")]
        (true, Implementation::Neon),
    ];
    let extra = extra.iter().filter(|(has, _)| *has).map(|(_, implementation)| *implementation);
    std::iter::once(Implementation::Scalar).chain(extra).collect()
}

/// Selects by `wanted`, the value of `STERNA_CPU`, on a CPU that has `detected`, the simplest first.
fn choose(wanted: Option<&str>, mut detected: Vec<Implementation>) -> Choice {
    let best = |available: &[Implementation]| {
        [Implementation::Neon, Implementation::Avx2, Implementation::Avx512]
            .into_iter()
            .find(|implementation| available.contains(implementation))
            .unwrap_or(Implementation::Scalar)
    };
    let Some(wanted) = wanted.filter(|value| !value.is_empty()) else {
        return Choice { chosen: best(&detected), available: detected, warning: None };
    };
    if let Some(place) = detected.iter().position(|implementation| implementation.name() == wanted) {
        detected.truncate(place + 1);
        return Choice { chosen: detected[place], available: detected, warning: None };
    }
    let names: Vec<_> = detected.iter().map(|implementation| implementation.name()).collect();
    let chosen = best(&detected);
    let warning =
        format!("STERNA_CPU={wanted} is ignored and {} is used: this CPU has {}", chosen.name(), names.join(", "),);
    Choice { chosen, available: detected, warning: Some(warning) }
}

#[cfg(test)]
mod tests {
    use super::Implementation::*;
    use super::*;

    #[test]
    fn without_the_variable_the_best_is_chosen() {
        assert_eq!(choose(None, vec![Scalar]).chosen, Scalar);
        assert_eq!(choose(None, vec![Scalar, Avx2]).chosen, Avx2);
        assert_eq!(choose(Some(""), vec![Scalar, Avx2, Avx512]).chosen, Avx2);
        assert_eq!(choose(None, vec![Scalar, Neon]).chosen, Neon);
    }

    #[test]
    fn a_named_implementation_is_used_and_hides_better_ones() {
        let all = || vec![Scalar, Avx2, Avx512];
        let choice =
            |available: &[Implementation], chosen| Choice { available: available.to_vec(), chosen, warning: None };
        assert_eq!(choose(Some("scalar"), all()), choice(&[Scalar], Scalar));
        assert_eq!(choose(Some("avx2"), all()), choice(&[Scalar, Avx2], Avx2));
        assert_eq!(choose(Some("avx512"), all()), choice(&[Scalar, Avx2, Avx512], Avx512));
        assert_eq!(choose(Some("neon"), vec![Scalar, Neon]), choice(&[Scalar, Neon], Neon));
    }

    #[test]
    fn a_name_that_is_unknown_or_unavailable_is_ignored_with_a_warning() {
        for name in ["avx512", "AVX2", "sse9", "neon"] {
            let choice = choose(Some(name), vec![Scalar, Avx2]);
            assert_eq!((choice.chosen, &choice.available[..]), (Avx2, &[Scalar, Avx2][..]));
            assert_eq!(
                choice.warning.unwrap(),
                format!("STERNA_CPU={name} is ignored and avx2 is used: this CPU has scalar, avx2")
            );
        }
    }

    #[test]
    fn what_is_chosen_is_available() {
        assert!(Implementation::available().contains(&Implementation::chosen()));
        assert_eq!(Implementation::available()[0], Scalar);
    }
}
