//! Chooses the directory of the records, which must survive a crash and a reboot and be found by `sterna recover`.

use std::ffi::OsString;
use std::path::PathBuf;

use super::Failure;
use crate::args::StateArgs;

pub(super) fn choose(args: &StateArgs) -> Result<PathBuf, Failure> {
    match &args.state_dir {
        Some(dir) => Ok(dir.clone()),
        None => {
            default(rustix::process::geteuid().is_root(), std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"))
                .ok_or_else(|| Failure::usage(&"there is no home directory to keep records in; give --state-dir DIR"))
        }
    }
}

/// Returns the default; none if the environment has no usable directory.
fn default(root: bool, state_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    if root {
        return Some("/var/lib/sterna".into());
    }
    // XDG Base Directory Specification: relative paths are invalid and to be ignored.
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(state_home).or_else(|| absolute(home).map(|home| home.join(".local/state")))?;
    Some(base.join("sterna"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_systems_for_root_and_the_users_otherwise() {
        let is = |text: &str| Some(PathBuf::from(text));
        let set = |text: &str| Some(OsString::from(text));
        assert_eq!(default(true, set("/state"), set("/home/a")), is("/var/lib/sterna"));
        assert_eq!(default(false, set("/state"), set("/home/a")), is("/state/sterna"));
        assert_eq!(default(false, None, set("/home/a")), is("/home/a/.local/state/sterna"));
        assert_eq!(default(false, set("relative"), set("/home/a")), is("/home/a/.local/state/sterna"));
        assert_eq!(default(false, set(""), set("")), None);
        assert_eq!(default(false, None, None), None);
    }

    #[test]
    fn a_given_directory_is_used() {
        let args = StateArgs { state_dir: Some("elsewhere".into()) };
        assert_eq!(choose(&args).unwrap(), PathBuf::from("elsewhere"));
    }
}
