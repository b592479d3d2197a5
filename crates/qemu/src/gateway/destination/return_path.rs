//! The return path of the destination QEMU: a thread reads its messages for the driver, and no faster than the driver handles them.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use sterna_engine::switchover::Events;

use super::driver::Event;
use crate::gateway::backlog::BacklogEntry;
use crate::stream::ReturnPathReader;

/// Reads messages until QEMU closes the return path, the driver ends, or reading fails.
pub(super) fn read_return_path(
    mut reader: ReturnPathReader<UnixStream>,
    backlog: &BacklogEntry,
    events: &Events<Event>,
) {
    loop {
        let message = match reader.next_message() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => break,
            Err(error) => Err(format!("the destination QEMU's return path: {error}")),
        };
        let failed = message.is_err();
        if !backlog.wait() || !events.send(Event::ReturnPath(message)) || failed {
            break;
        }
    }
    // QEMU closes the return path when it has finished or failed, and reports which by its events.
    let _ = reader.get_ref().shutdown(Shutdown::Read);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;
    use crate::gateway::backlog::Backlog;

    #[test]
    fn a_qemu_that_floods_its_return_path_has_to_wait_for_a_driver_that_is_busy() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let backlog = Backlog::default();
        let (events, inbox) = Events::channel();
        let entry = backlog.entry();
        let reading = std::thread::spawn(move || read_return_path(ReturnPathReader::new(ours), &entry, &events));
        // PONG, four bytes long (`migration/migration.c`).
        let pongs: Vec<u8> = [0, 2, 0, 4, 0, 0, 0, 1].repeat(512);
        let mut pushed_back = false;
        for _ in 0..65536 {
            pushed_back = qemu.write_all(&pongs).is_err();
            if pushed_back {
                break;
            }
        }
        assert!(pushed_back, "all of it was read");
        drop(backlog);
        reading.join().unwrap();
        assert!(inbox.iter().count() < 65536, "what was read is bounded");
    }
}
