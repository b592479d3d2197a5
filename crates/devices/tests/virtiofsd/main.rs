//! A device's state is moved between two processes of virtiofsd, a back-end of another project. The test is the monitor
//! and the guest: it uses the file system over a virtqueue, and its open files stay open.

mod engine;
mod support;

use std::path::{Path, PathBuf};
use std::time::Instant;

use sterna_devices::vhost_user::{BackEnd, Error, Step};
use support::{Daemon, Device, Fuse, Machine, ROOT, ample, may_open_by_handle, program};
use tempfile::TempDir;

/// Linux's numbers.
const EIO: i32 = 5;

/// The program and the shared directory, which both sides use.
struct Shared {
    program: PathBuf,
    directory: TempDir,
}

/// A daemon, a guest, and the device between them.
struct Side {
    daemon: Daemon,
    device: Device,
    guest: Fuse,
}

impl Shared {
    /// Returns `None` without a virtiofsd.
    fn new() -> Option<Shared> {
        Some(Shared { program: program()?, directory: tempfile::tempdir().expect("a directory") })
    }

    fn host(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a guest that has mounted the directory.
    fn source(&self, options: &[&str]) -> Side {
        let daemon = Daemon::start(&self.program, self.host(), options);
        let machine = Machine::new();
        let mut device = machine.attach(&daemon);
        machine.start(&mut device);
        let mut guest = Fuse::new(machine);
        guest.init(&device);
        Side { daemon, device, guest }
    }

    /// Returns another daemon, with the guest's memory; the rings are not started.
    fn destination(&self, source: &Side, options: &[&str]) -> Side {
        let daemon = Daemon::start(&self.program, self.host(), options);
        let guest = source.guest.moved();
        let device = guest.machine.attach(&daemon);
        Side { daemon, device, guest }
    }

    /// Returns another daemon, with an empty guest.
    fn empty_destination(&self) -> Side {
        let daemon = Daemon::start(&self.program, self.host(), &[]);
        let guest = Fuse::new(Machine::new());
        let device = guest.machine.attach(&daemon);
        Side { daemon, device, guest }
    }

    /// Moves the guest completely. The source is gone afterwards.
    fn moved(&self, mut source: Side, options: &[&str]) -> Side {
        source.suspend();
        let mut destination = self.destination(&source, options);
        load(&destination.back_end("fs-destination"), &source.state()).expect("the destination loads");
        source.daemon.kill();
        destination.start();
        destination
    }
}

impl Side {
    fn back_end(&self, name: &str) -> BackEnd {
        self.device.back_end(name)
    }

    fn start(&mut self) {
        self.guest.machine.start(&mut self.device);
    }

    fn suspend(&mut self) {
        self.guest.machine.suspend(&self.device);
    }

    /// Saves the suspended device's state.
    fn state(&self) -> Vec<u8> {
        save(&self.back_end("fs-source")).expect("the source saves")
    }

    fn lookup(&mut self, parent: u64, name: &str) -> u64 {
        self.guest.lookup(&self.device, parent, name).expect("LOOKUP")
    }

    /// Creates a file and returns its node and handle.
    fn create(&mut self, parent: u64, name: &str) -> (u64, u64) {
        self.guest.create(&self.device, parent, name).expect("CREATE")
    }

    fn write(&mut self, (node, handle): (u64, u64), at: u64, bytes: &[u8]) {
        self.guest.write(&self.device, node, handle, at, bytes).expect("WRITE");
    }

    /// Reads an open file, up to a thousand bytes.
    fn read(&mut self, (node, handle): (u64, u64)) -> Result<Vec<u8>, i32> {
        self.guest.read(&self.device, node, handle, 0, 1000)
    }
}

fn save(back_end: &BackEnd) -> Result<Vec<u8>, Error> {
    let mut saver = back_end.save(ample())?;
    let (mut state, mut buffer) = (Vec::new(), vec![0; 4096]);
    loop {
        match saver.read(&mut buffer, ample())? {
            0 => break,
            read => state.extend_from_slice(&buffer[..read]),
        }
    }
    assert_eq!(saver.finish(ample())?, state.len() as u64);
    Ok(state)
}

fn load(back_end: &BackEnd, state: &[u8]) -> Result<u64, Error> {
    let mut loader = back_end.load(ample())?;
    // Pieces of another size than those read.
    for piece in state.chunks(1000) {
        loader.write(piece, ample())?;
    }
    loader.finish(ample())
}

fn error<T>(result: Result<T, Error>) -> Error {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(error) => error,
    }
}

/// Makes the state long, by many files with long names that the guest has looked up. Returns its minimum length.
fn lengthen(shared: &Shared, source: &mut Side) -> usize {
    const FILES: usize = 6000;
    const NAME: usize = 250;
    for index in 0..FILES {
        let name = format!("{index:0>NAME$}");
        std::fs::write(shared.host().join(&name), "").expect("a file");
        source.lookup(ROOT, &name);
    }
    FILES * NAME
}

#[test]
fn a_file_that_was_open_is_read_and_written_through_the_same_handle() {
    let Some(shared) = Shared::new() else { return };
    let mut source = shared.source(&[]);
    std::fs::write(shared.host().join("existing"), "written by the host").expect("a file");
    let existing = source.lookup(ROOT, "existing");
    let opened = (existing, source.guest.open(&source.device, existing).expect("OPEN"));
    let created = source.create(ROOT, "created");
    source.write(created, 0, b"before the move");
    assert_ne!(opened.1, created.1);

    let mut destination = shared.moved(source, &[]);

    assert_eq!(destination.read(created).expect("READ"), b"before the move");
    assert_eq!(destination.read(opened).expect("READ"), b"written by the host");
    destination.write(created, 7, b"and after the move");
    assert_eq!(std::fs::read(shared.host().join("created")).expect("the file"), b"before and after the move");
    assert_eq!(destination.lookup(ROOT, "existing"), existing, "node numbers go on");
    let next = destination.create(ROOT, "next");
    assert!([existing, created.0].iter().all(|node| *node != next.0), "no node number is given twice");
    assert!([opened.1, created.1].iter().all(|handle| *handle != next.1), "no handle is given twice");
}

/// Moves a guest with many open files twice.
fn many_files_stay_open(mode: &str, announced: bool) {
    const FILES: u64 = 40;
    let Some(shared) = Shared::new() else { return };
    if mode == "file-handles" && !may_open_by_handle(shared.host()) {
        return;
    }
    let options = [&*format!("--migration-mode={mode}")];
    let mut side = shared.source(&options);
    std::fs::create_dir(shared.host().join("inner")).expect("a directory");
    let inner = side.lookup(ROOT, "inner");
    let open: Vec<(u64, u64)> = (0..FILES)
        .map(|file| {
            let opened = side.create(if file % 2 == 0 { ROOT } else { inner }, &format!("file-{file}"));
            side.write(opened, 0, format!("{file} at the source").as_bytes());
            opened
        })
        .collect();
    for turn in ["destination", "destination of the destination"] {
        if announced {
            side.device.announce();
        }
        side = shared.moved(side, &options);
        for (file, &opened) in (0u64..).zip(&open) {
            let before = side.read(opened).expect("READ");
            assert!(before.starts_with(format!("{file} at the source").as_bytes()), "{file}: {before:?}");
            side.write(opened, before.len() as u64, format!(", {turn}").as_bytes());
        }
    }
    for file in 0..FILES {
        let name = format!("{}file-{file}", if file % 2 == 0 { "" } else { "inner/" });
        let content = std::fs::read_to_string(shared.host().join(name)).expect("the file");
        assert_eq!(content, format!("{file} at the source, destination, destination of the destination"));
    }
}

#[test]
fn many_files_stay_open_by_their_paths() {
    many_files_stay_open("find-paths", true);
}

#[test]
fn many_files_stay_open_without_an_announced_migration() {
    many_files_stay_open("find-paths", false);
}

#[test]
fn many_files_stay_open_by_their_handles() {
    many_files_stay_open("file-handles", true);
}

#[test]
fn a_request_made_just_before_the_move_is_answered_once_by_either_daemon() {
    const MOVES: u64 = 10;
    let Some(shared) = Shared::new() else { return };
    let mut side = shared.source(&[]);
    let opened @ (node, handle) = side.create(ROOT, "file");
    for turn in 0..MOVES {
        side.guest.begin_write(node, handle, turn, &[b'a' + turn as u8]);
        // Suspended before the device is notified, or meanwhile: both end with the answer in the guest's memory.
        if turn % 2 == 0 {
            side.device.kick();
        }
        side = shared.moved(side, &[]);
        side.guest.finish_write(&side.device).expect("WRITE");
    }
    assert_eq!(side.read(opened).expect("READ"), b"abcdefghij");
}

#[test]
fn an_announced_migration_is_prepared_while_the_guest_runs() {
    let Some(shared) = Shared::new() else { return };
    for announced in [true, false] {
        let mut source = shared.source(&[]);
        if announced {
            source.device.announce();
        }
        source.suspend();
        source.state();
        // The line that virtiofsd logs if it has to begin only now.
        assert_ne!(source.daemon.log().contains("did not announce migration"), announced);
    }
}

/// Returns a guest with one file that stays and one that is deleted while open.
fn with_a_deleted_file(shared: &Shared, mode: &str) -> (Side, [(u64, u64); 2]) {
    let mut source = shared.source(&[mode]);
    let open = ["stays", "deleted"].map(|name| {
        let opened = source.create(ROOT, name);
        source.write(opened, 0, name.as_bytes());
        opened
    });
    source.guest.unlink(&source.device, ROOT, "deleted").expect("UNLINK");
    assert!(!shared.host().join("deleted").exists());
    (source, open)
}

#[test]
fn a_deleted_file_has_no_path_so_the_load_is_refused_and_the_source_continues() {
    let Some(shared) = Shared::new() else { return };
    let (mut source, open) = with_a_deleted_file(&shared, "--migration-mode=find-paths");
    source.suspend();
    let destination = shared.destination(&source, &["--migration-on-error=abort"]);
    let error = error(load(&destination.back_end("fs-destination"), &source.state()));
    assert!(matches!(error, Error::Refused { step: Step::CheckLoaded, .. }), "{error:?}");
    assert!(error.to_string().contains("fs-destination"), "{error}");
    assert!(!destination.daemon.log().is_empty(), "the reason is in its log, as the error says");
    drop(destination);
    source.start();
    for (opened, content) in open.into_iter().zip(["stays", "deleted"]) {
        assert_eq!(source.read(opened).expect("READ"), content.as_bytes());
    }
}

#[test]
fn a_deleted_file_gives_the_guest_errors_with_the_option_for_that() {
    let Some(shared) = Shared::new() else { return };
    let (source, [stays, deleted]) = with_a_deleted_file(&shared, "--migration-mode=find-paths");
    let mut destination = shared.moved(source, &["--migration-on-error=guest-error"]);
    assert_eq!(destination.read(stays).expect("READ"), b"stays");
    assert_eq!(destination.read(deleted), Err(EIO));
}

#[test]
fn a_deleted_file_is_found_by_its_handle() {
    const MODE: &str = "--migration-mode=file-handles";
    let Some(shared) = Shared::new() else { return };
    if !may_open_by_handle(shared.host()) {
        return;
    }
    let (source, open) = with_a_deleted_file(&shared, MODE);
    let mut destination = shared.moved(source, &[MODE]);
    for (opened, content) in open.into_iter().zip(["stays", "deleted"]) {
        assert_eq!(destination.read(opened).expect("READ"), content.as_bytes());
    }
    assert_eq!(std::fs::read_dir(shared.host()).expect("the directory").count(), 1);
}

#[test]
fn a_replaced_file_is_detected_if_handles_are_verified() {
    const VERIFY: &str = "--migration-verify-handles";
    let Some(shared) = Shared::new() else { return };
    if !may_open_by_handle(shared.host()) {
        return;
    }
    let mut source = shared.source(&[VERIFY]);
    source.create(ROOT, "file");
    source.suspend();
    let state = source.state();
    let file = shared.host().join("file");
    std::fs::rename(&file, shared.host().join("aside")).expect("moved aside");
    std::fs::write(&file, "another").expect("a file");
    let destination = shared.destination(&source, &[VERIFY]);
    let error = error(load(&destination.back_end("fs-destination"), &state));
    assert!(matches!(error, Error::Refused { step: Step::CheckLoaded, .. }), "{error:?}");
}

#[test]
fn a_damaged_or_truncated_state_is_refused_and_the_complete_one_loads_after_it() {
    let Some(shared) = Shared::new() else { return };
    let mut source = shared.source(&[]);
    let opened = source.create(ROOT, "file");
    source.write(opened, 0, b"content");
    source.suspend();
    let state = source.state();
    let mut destination = shared.destination(&source, &[]);
    let back_end = destination.back_end("fs-destination");
    for length in 0..state.len() {
        let error = error(load(&back_end, &state[..length]));
        assert!(
            matches!(error, Error::Refused { step: Step::CheckLoaded, .. }),
            "{length} of {}: {error:?}",
            state.len()
        );
    }
    // The first byte is the version of the rest.
    let damaged = [&[0x7f], &state[1..]].concat();
    let error = error(load(&back_end, &damaged));
    assert!(matches!(error, Error::Refused { step: Step::CheckLoaded, .. }), "{error:?}");
    load(&back_end, &state).expect("the whole state");
    destination.start();
    assert_eq!(destination.read(opened).expect("READ"), b"content");
}

#[test]
fn an_aborted_save_leaves_the_device_working_and_can_be_repeated() {
    let Some(shared) = Shared::new() else { return };
    let mut source = shared.source(&[]);
    let opened = source.create(ROOT, "file");
    source.write(opened, 0, b"content");
    let least = lengthen(&shared, &mut source);
    source.device.announce();
    source.suspend();
    let mut saver = source.back_end("fs-source").save(ample()).expect("it begins");
    assert_ne!(saver.read(&mut [0; 4096], ample()).expect("the beginning"), 0);
    drop(saver);
    source.device.withdraw();
    source.start();
    assert_eq!(source.read(opened).expect("READ"), b"content");
    source.device.announce();
    source.suspend();
    let state = source.state();
    assert!(state.len() > least, "{}", state.len());
    let mut destination = shared.destination(&source, &[]);
    load(&destination.back_end("fs-destination"), &state).expect("the destination loads");
    destination.start();
    assert_eq!(destination.read(opened).expect("READ"), b"content");
}

#[test]
fn a_daemon_that_is_killed_while_it_saves_or_loads_is_reported() {
    let Some(shared) = Shared::new() else { return };
    let mut source = shared.source(&[]);
    lengthen(&shared, &mut source);
    source.suspend();
    let state = source.state();

    let mut destination = shared.destination(&source, &[]);
    let mut loader = destination.back_end("fs-destination").load(ample()).expect("it begins");
    let (first, rest) = state.split_at(state.len() / 2);
    loader.write(first, ample()).expect("it reads");
    destination.daemon.kill();
    let loading = error(loader.write(rest, ample()));
    assert!(matches!(loading, Error::Gone { step: Step::Write, .. }), "{loading:?}");
    assert!(loading.to_string().contains("fs-destination"), "{loading}");

    // More than fits the pipe, so the daemon cannot have finished when it is killed.
    let mut saver = source.back_end("fs-source").save(ample()).expect("it begins");
    let mut buffer = vec![0; 4096];
    let mut read = saver.read(&mut buffer, ample()).expect("the beginning");
    source.daemon.kill();
    let saving = loop {
        match saver.read(&mut buffer, ample()) {
            Ok(0) => break error(saver.finish(ample())),
            Ok(more) => read += more,
            Err(gone) => break gone,
        }
    };
    assert!(read < state.len(), "{read}");
    assert!(matches!(saving, Error::Gone { step: Step::Read | Step::CheckSaved, .. }), "{saving:?}");
    assert!(saving.to_string().contains("fs-source"), "{saving}");
}

#[test]
fn a_daemon_that_hangs_is_an_error_at_the_deadline() {
    let Some(shared) = Shared::new() else { return };
    let mut source = shared.source(&[]);
    lengthen(&shared, &mut source);
    source.suspend();
    let state = source.state();

    let mut destination = shared.destination(&source, &[]);
    let mut loader = destination.back_end("fs-destination").load(ample()).expect("it begins");
    destination.daemon.hang();
    let loading = error(loader.write(&state, Instant::now()));
    assert!(matches!(loading, Error::Deadline { step: Step::Write, disconnected: false, .. }), "{loading:?}");

    source.daemon.hang();
    let saving = error(source.back_end("fs-source").save(Instant::now()));
    assert!(matches!(saving, Error::Deadline { step: Step::AskToSave, disconnected: true, .. }), "{saving:?}");
}
