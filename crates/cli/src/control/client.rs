//! Finds the control sockets of a state directory, and asks them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use sterna_engine::directory::Directory;
use sterna_engine::transport::unix;

use super::message::{Answer, Command, MAX_ANSWER, Request, Running, VERSION};
use super::process_in;

/// How long a process may take for its answer.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Returns the migrations that processes work on, by their sockets in `dir`. Sockets of processes that were killed are removed.
///
/// # Errors
/// The directory exists, and other users could change its content.
pub(crate) fn running(dir: &Path) -> io::Result<Vec<Running>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let directory = Directory::open(dir)?;
    directory.check_private()?;
    let names = directory.names()?;
    let processes = names.iter().filter_map(|name| name.to_str().and_then(process_in));
    let mut running: Vec<Running> = processes.filter_map(|process| shown(dir, process)).collect();
    running.sort_by_key(|migration| migration.started_ms);
    Ok(running)
}

/// Returns the migration of this process; none if the process has ended.
fn shown(dir: &Path, process: u32) -> Option<Running> {
    match ask(dir, process, Command::Show) {
        Ok(answer) => answer.migration,
        Err(error) => {
            if error.kind() == io::ErrorKind::ConnectionRefused {
                // Taking the place of a socket that nobody listens on removes it; one that is in use is left alone.
                drop(unix::listen(&dir.join(super::name_of(process))));
            }
            tracing::debug!(process, %error, "asking a control socket");
            None
        }
    }
}

/// Has the process carry out `command`.
///
/// # Errors
/// The process has ended, or does not answer in time.
pub(crate) fn ask(dir: &Path, process: u32, command: Command) -> io::Result<Answer> {
    let stream = unix::connect(&dir.join(super::name_of(process)), ANSWER_TIME)?;
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    stream.set_write_timeout(Some(ANSWER_TIME))?;
    let mut line = serde_json::to_vec(&Request { version: VERSION, command })?;
    line.push(b'\n');
    (&stream).write_all(&line)?;
    read_answer(&stream)
}

fn read_answer(stream: &UnixStream) -> io::Result<Answer> {
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER)).read_until(b'\n', &mut line)?;
    serde_json::from_slice(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
