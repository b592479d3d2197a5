//! Finds the tools that `scripts/setup` installed (three QEMU releases, a kernel, accel-config, virtiofsd) and builds the guests' init.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::Error;
use crate::error::run;

/// The QEMU releases that tests run against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QemuVersion {
    /// 7.2, of Debian 12.
    V7_2,
    /// 10.0, of Debian 12's backports.
    V10_0,
    /// 11.1, of Debian's testing suite. Mirrors may lack this release ([`Error::NotInMirrors`]).
    V11_1,
}

impl QemuVersion {
    /// All releases, the oldest first.
    pub const ALL: [QemuVersion; 3] = [QemuVersion::V7_2, QemuVersion::V10_0, QemuVersion::V11_1];

    /// Returns the newest machine type of this release that the laboratory uses.
    #[must_use]
    pub fn machine(self) -> &'static str {
        match self {
            QemuVersion::V7_2 => "pc-q35-7.2",
            QemuVersion::V10_0 => "pc-q35-10.0",
            QemuVersion::V11_1 => "pc-q35-11.1",
        }
    }

    fn directory(self) -> &'static str {
        match self {
            QemuVersion::V7_2 => "qemu-7.2",
            QemuVersion::V10_0 => "qemu-10.0",
            QemuVersion::V11_1 => "qemu-11.1",
        }
    }

    /// Returns whether this release needs newer libraries than the machine has, including libc. Its tree then has all of them, and
    /// the loader that starts the program.
    fn has_its_own_loader(self) -> bool {
        self == QemuVersion::V11_1
    }
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            QemuVersion::V7_2 => "7.2",
            QemuVersion::V10_0 => "10.0",
            QemuVersion::V11_1 => "11.1",
        })
    }
}

/// The directory that `scripts/setup` filled.
#[derive(Clone, Debug)]
pub struct Tools {
    directory: PathBuf,
}

impl Tools {
    /// Finds `target/tools` above the running program or the current directory; `STERNA_TOOLS` names another place.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if there is none.
    pub fn locate() -> Result<Tools, Error> {
        if let Some(directory) = std::env::var_os("STERNA_TOOLS").map(PathBuf::from) {
            return if directory.is_dir() {
                Ok(Tools { directory })
            } else {
                Err(Error::missing("the directory that STERNA_TOOLS names", &[directory]))
            };
        }
        let found = starting_points().iter().flat_map(|start| start.ancestors()).find_map(|directory| {
            let tools = directory.join("target/tools");
            tools.is_dir().then_some(tools)
        });
        found.map(|directory| Tools { directory }).ok_or_else(|| Error::missing("target/tools", &starting_points()))
    }

    /// Returns the directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the kernel that Linux guests boot: the program, which is taken out of Debian's image the first time.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if the image was not unpacked, [`Error::Io`] if it has another format.
    pub fn kernel(&self) -> Result<PathBuf, Error> {
        crate::kernel::unpacked(&existing("the guests' kernel", self.directory.join("kernel/vmlinuz"))?)
    }

    /// Returns the kernel's modules for virtiofs, disks and a balloon, in the order in which a guest can load them.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if they were not unpacked.
    pub fn modules(&self) -> Result<Vec<PathBuf>, Error> {
        let directory = existing("the modules of the guests' kernel", self.directory.join("kernel/modules"))?;
        let entries = std::fs::read_dir(&directory).map_err(Error::path("reading", &directory))?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        Ok(paths)
    }

    /// Returns the back-end of shared directories.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if it was not unpacked, [`Error::NotInMirrors`] if `scripts/setup` could not get it.
    pub fn virtiofsd(&self) -> Result<PathBuf, Error> {
        self.offered("virtiofsd", "virtiofsd", "virtiofsd/bin/virtiofsd")
    }

    /// Returns what is at `path` of the tool that is called `what` and lies in `directory`.
    fn offered(&self, what: &str, directory: &str, path: &str) -> Result<PathBuf, Error> {
        let path = self.directory.join(path);
        if !path.exists() {
            // scripts/setup writes this file if the machine's mirrors lack the release.
            let reason = self.directory.join(format!("{directory}-absent"));
            if let Ok(reason) = std::fs::read_to_string(reason) {
                return Err(Error::NotInMirrors { what: what.into(), reason: reason.trim().into() });
            }
        }
        existing(what, path)
    }

    /// Returns a command that runs a release from its unpacked tree: with libraries and modules in the environment, and firmware by
    /// `-L`. QEMU 11.1 is started by the loader of its own libc, so the command's program, and the target of `/proc/PID/exe`, is that
    /// loader.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if it was not unpacked, [`Error::NotInMirrors`] if `scripts/setup` could not get it.
    pub fn qemu(&self, version: QemuVersion) -> Result<Command, Error> {
        Ok(command(&self.qemu_words(version)?))
    }

    /// Returns the administrator's tool for DSA and IAA, and the directories of its libraries.
    pub(crate) fn accel_config(&self) -> Result<(PathBuf, String), Error> {
        let tree = self.directory.join("accel-config");
        let program = existing("accel-config", tree.join("usr/bin/accel-config"))?;
        Ok((program, libraries(&tree)))
    }

    /// Returns the command of [`Tools::qemu`] as words, for a command line that begins with other programs.
    pub(crate) fn qemu_words(&self, version: QemuVersion) -> Result<QemuWords, Error> {
        let tree = self.directory.join(version.directory());
        let what = format!("QEMU {version}");
        let name = version.directory();
        let program = self.offered(&what, name, &format!("{name}/usr/bin/qemu-system-x86_64"))?;
        let mut environment =
            vec![("QEMU_MODULE_DIR", tree.join("usr/lib/x86_64-linux-gnu/qemu").display().to_string())];
        let mut words = Vec::new();
        if version.has_its_own_loader() {
            let loader = existing(&what, tree.join("usr/lib64/ld-linux-x86-64.so.2"))?;
            words.extend([loader.display().to_string(), "--inhibit-cache".into(), "--library-path".into()]);
            words.push(libraries(&tree));
        } else {
            environment.push(("LD_LIBRARY_PATH", libraries(&tree)));
        }
        words.push(program.display().to_string());
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            words.extend(["-L".to_owned(), tree.join(firmware).display().to_string()]);
        }
        Ok(QemuWords { environment, words })
    }
}

/// The beginning of a QEMU command line.
pub(crate) struct QemuWords {
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) words: Vec<String>,
}

fn command(words: &QemuWords) -> Command {
    let mut command = Command::new(&words.words[0]);
    command.args(&words.words[1..]).envs(words.environment.iter().map(|(name, value)| (name, value)));
    command
}

/// Returns the directories of shared libraries in an unpacked tree, for `LD_LIBRARY_PATH` and the loader's `--library-path`.
fn libraries(tree: &Path) -> String {
    let [first, second] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|path| tree.join(path));
    format!("{}:{}", first.display(), second.display())
}

fn existing(what: &str, path: PathBuf) -> Result<PathBuf, Error> {
    if path.exists() { Ok(path) } else { Err(Error::missing(what, &[path])) }
}

fn starting_points() -> Vec<PathBuf> {
    std::env::current_exe().into_iter().chain(std::env::current_dir()).collect()
}

/// Returns the static program that is the Linux guests' init. It is built on first use in this process (cargo does nothing if it
/// is up to date). Without cargo, an earlier build is used.
///
/// # Errors
/// [`Error::ToolsMissing`] without the sources, [`Error::Command`] if it does not build.
pub fn guest_program() -> Result<PathBuf, Error> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = BUILT.get() {
        return Ok(path.clone());
    }
    let root = starting_points()
        .iter()
        .flat_map(|start| start.ancestors().map(Path::to_owned))
        .find(|directory| directory.join("guest/Cargo.toml").is_file())
        .ok_or_else(|| Error::missing("guest/Cargo.toml", &starting_points()))?;
    let target = root.join("target/guest");
    let program = target.join("x86_64-unknown-linux-gnu/release/sterna-guest");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(root.join("guest"))
        .args(["build", "--quiet", "--release", "--locked", "--target-dir"])
        .arg(&target);
    // The settings of this process's own build or test must not leak into another workspace's build.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let leaks =
            ["CARGO_ENCODED_", "CARGO_BUILD_", "CARGO_PKG_", "CARGO_PROFILE_", "CARGO_TARGET_", "CARGO_MANIFEST_"];
        if leaks.iter().any(|prefix| name.starts_with(prefix))
            || name.starts_with("RUSTFLAGS")
            || name == "LD_LIBRARY_PATH"
        {
            cargo.env_remove(&*name);
        }
    }
    match run(&mut cargo) {
        Ok(_) => {}
        Err(Error::Command { .. }) if program.exists() && which_cargo_is_missing() => {}
        Err(error) => return Err(error),
    }
    Ok(BUILT.get_or_init(|| program).clone())
}

fn which_cargo_is_missing() -> bool {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).arg("--version").output().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Guest, Qemu, QemuOptions, skip_if_unavailable};

    #[test]
    fn every_release_starts_from_where_it_was_unpacked() {
        let Some(tools) = skip_if_unavailable(Tools::locate()) else { return };
        for version in QemuVersion::ALL {
            let Some(mut qemu) = skip_if_unavailable(tools.qemu(version)) else { return };
            let output = run(qemu.arg("--version")).expect("QEMU starts");
            assert!(output.contains(&format!("version {version}.")), "{output}");
        }
    }

    #[test]
    fn qemu_11_1_maps_no_library_of_this_machine() {
        let Some(qemu) = skip_if_unavailable(Qemu::start(&QemuOptions::new(QemuVersion::V11_1, Guest::None))) else {
            return;
        };
        let tree = Tools::locate().unwrap().directory().canonicalize().unwrap().join("qemu-11.1");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", qemu.pid())).unwrap();
        let mapped: Vec<&str> = maps.lines().filter(|line| line.contains(".so")).collect();
        assert!(mapped.iter().any(|line| line.contains("libc.so")), "{maps}");
        let foreign = mapped.iter().find(|line| !line.contains(&tree.display().to_string()));
        assert_eq!(foreign, None);
    }

    #[test]
    fn a_release_that_the_mirrors_lack_is_reported_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let tools = Tools { directory: directory.path().into() };
        assert!(matches!(tools.qemu(QemuVersion::V11_1), Err(Error::ToolsMissing { .. })));
        std::fs::write(directory.path().join("qemu-11.1-absent"), "the testing suite has QEMU 12.0, not 11.1\n")
            .unwrap();
        let error = tools.qemu(QemuVersion::V11_1).unwrap_err();
        assert!(matches!(error, Error::NotInMirrors { .. }) && error.is_absence());
        assert_eq!(error.to_string(), "QEMU 11.1 cannot be had here: the testing suite has QEMU 12.0, not 11.1");
        assert!(matches!(tools.qemu(QemuVersion::V10_0), Err(Error::ToolsMissing { .. })));
        std::fs::write(directory.path().join("virtiofsd-absent"), "there is no testing suite\n").unwrap();
        assert!(matches!(tools.virtiofsd(), Err(Error::NotInMirrors { .. })));
    }
}
