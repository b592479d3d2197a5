//! Running migrations are shown and controlled by a socket that each `send` and `receive` has in its state directory, beside the records.

mod client;
mod message;
mod server;

pub(crate) use self::client::{ask, running};
pub(crate) use self::message::{AnswerKind, Command, Running};
pub(crate) use self::server::{Subject, with_socket};

/// Returns the name of a process's socket.
fn name_of(process: u32) -> String {
    format!("{process}.control")
}

/// Returns the process whose socket has this name.
fn process_in(name: &str) -> Option<u32> {
    name.strip_suffix(".control")?.parse().ok()
}
