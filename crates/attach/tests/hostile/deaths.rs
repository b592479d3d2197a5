pub(crate) const CASES: &[(&str, fn())] = &[];
