//! Runs `accel-config`, the tool by which administrators set up DSA and IAA, on a directory in place of the kernel's devices.
//!
//! The tool only reads `/sys/bus/dsa`, so each run has a mount namespace of its own in which the directory is mounted there.
//! Regular files represent attributes; `accel_config.c` imitates the rest of their behaviour. The tool checks in `/sys/module/idxd`
//! whether the driver is loaded, and in `/sys/bus/dsa/drivers` which drivers a queue can have.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::error::run;
use crate::{Error, Tools};

/// In the namespace, with the directory, the libraries, the notes and the library to load first as arguments.
const SCRIPT: &str = r#"
devices=$1 libraries=$2 notes=$3 first=$4
shift 4
mount -t tmpfs none /sys
mkdir -p /sys/module/idxd /sys/bus/dsa/devices
for driver in idxd user dmaengine; do
    mkdir -p /sys/bus/dsa/drivers/$driver
    : >/sys/bus/dsa/drivers/$driver/bind
done
mount --bind "$devices" /sys/bus/dsa/devices
exec env LD_LIBRARY_PATH="$libraries" ATTRIBUTES_WRITTEN="$notes" LD_PRELOAD="$first" "$@"
"#;

/// The tool, and the devices that it sees.
#[derive(Debug)]
pub struct AccelConfig {
    program: PathBuf,
    libraries: String,
    devices: PathBuf,
    scratch: TempDir,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configured {
    /// The output.
    pub output: String,
    /// The attributes it wrote, in order: `dsa0/wq0.0/size` and the text.
    pub written: Vec<(String, String)>,
}

impl AccelConfig {
    /// The tool with `devices` in place of `/sys/bus/dsa/devices`.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] if it was not unpacked, [`Error::Unavailable`] if this user may not mount.
    pub fn new(tools: &Tools, devices: &Path) -> Result<AccelConfig, Error> {
        let (program, libraries) = tools.accel_config()?;
        let scratch = tempfile::tempdir().map_err(Error::io("make a directory"))?;
        let source = scratch.path().join("attributes.c");
        fs::write(&source, include_str!("accel_config.c")).map_err(Error::path("write", &source))?;
        let tool = AccelConfig { program, libraries, devices: devices.to_owned(), scratch };
        let mut compiler = Command::new("cc");
        run(compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(tool.first()).arg(&source))?;
        run(tool.command().arg("true")).map_err(|error| Error::Unavailable {
            what: "a mount namespace for accel-config".into(),
            reason: match error {
                Error::Command { output, .. } => output,
                other => other.to_string(),
            },
        })?;
        Ok(tool)
    }

    /// Runs it with `words`, to its end.
    ///
    /// # Errors
    /// [`Error::Command`] if it fails.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Configured, Error> {
        let notes = self.notes();
        match fs::remove_file(&notes) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Error::path("remove", &notes)(error)),
            _ => {}
        }
        let output = run(self.command().arg(&self.program).args(words))?;
        let written = match fs::read_to_string(&notes) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::path("read", &notes)(error)),
        };
        let pair = |line: &str| {
            let (attribute, text) = line.split_once(' ').unwrap_or((line, ""));
            (attribute.to_owned(), text.to_owned())
        };
        Ok(Configured { output, written: written.lines().map(pair).collect() })
    }

    fn first(&self) -> PathBuf {
        self.scratch.path().join("attributes.so")
    }

    fn notes(&self) -> PathBuf {
        self.scratch.path().join("written")
    }

    /// Returns the command without the program's name and words.
    fn command(&self) -> Command {
        let mut command = Command::new("unshare");
        command.arg("--mount");
        if !rustix::process::geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-euc", SCRIPT, "accel-config"]);
        command.arg(&self.devices).arg(&self.libraries).arg(self.notes()).arg(self.first());
        command
    }
}
