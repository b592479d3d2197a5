//! The destination: libvirt restores the domain from a FIFO, which this file writes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode as FileMode, OFlags, mkfifoat};
use rustix::io::Errno;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{send_message, with_heartbeats};
use sterna_engine::destination::{Before, Destination};
use sterna_engine::migration::{MigrationError, RESUME};
use sterna_engine::report::{Observer, ReceiveReport};
use sterna_engine::session::{
    AcceptedSource, DRY_RUN, Declined, Features, Handshake, OPENING, SourceRequest, is_dry_run,
};
use sterna_engine::source::MonitorRecord;
use sterna_engine::transport::{Limits, Listener};
use sterna_engine::vmm::{DestinationVmm, GuestEnd, VmmError};
use sterna_engine::{directory::Directory, process};
use sterna_libvirt::{Connection, Destroy, Domain, SavedImage, State};
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, Hello, Machine, Mode};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{ProcessIdentity, SourceAfter};
use sterna_wire::text::cleaned;

use super::markers::Markers;
use super::offer::Offer;
use crate::discover::MappedRam;
use crate::gateway::direct::ram;
use crate::gateway::direct::stream::{self, BlockLength};
use crate::gateway::fault::WithFaultPoints;
use crate::gateway::waiting::Waiting;
use crate::gateway::{GatewayError, LibvirtReceiveOptions, Monitor, claim, earlier, first_moment, qemu};
use crate::libvirt;
use crate::qmp::Qmp;

/// Beginning and end of a FIFO's name: between them are the domain's name, and the number of the process that has made it.
const PREFIX: &str = "libvirt-";
const SUFFIX: &str = ".image";
/// How long libvirt may take to begin to read the image: it checks the domain only after it has read the header.
const OPENING_TIME: Duration = Duration::from_secs(20);
/// How long libvirt and QEMU may take until QEMU has read the opening: QEMU allocates its memory first.
const STARTING_TIME: Duration = Duration::from_secs(120);
/// How long QEMU and libvirt may take to load the devices.
const LOADING_TIME: Duration = Duration::from_secs(60);
/// How long libvirt may take to end a restore whose image has ended.
const ENDING_TIME: Duration = Duration::from_secs(30);
/// How long to try to connect to libvirt again, for a guest that belongs to this side, and the pause between two attempts.
const RECONNECTING_TIME: Duration = Duration::from_secs(60);
const RECONNECTING_PAUSE: Duration = Duration::from_millis(200);
/// Pause between two looks for what has no event.
const PAUSE: Duration = Duration::from_millis(10);
/// How long a write to the FIFO waits before it is looked whether it is still wanted.
const WRITE_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Waits for a source whose QEMU belongs to libvirt, and has libvirt on this host run its guest.
///
/// # Errors
/// Only for failures before a migration was accepted; the report describes every other end.
pub(in crate::gateway) fn receive(
    options: &LibvirtReceiveOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let connection = libvirt::connection(options.uri.as_deref()).map_err(GatewayError::refused)?;
    let fifos = Fifos::open()?;
    qemu::check_state_directory(&options.state_dir)?;
    let listener = Listener::bind(&options.listen).map_err(GatewayError::refused)?;
    let address = listener.local_address();
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::refused)?;
    observer.note(&format!("libvirt {} at {}", connection.version(), connection.uri()));
    observer.listening(&address.to_string());

    let mut offered = Destination::FEATURES.offered.to_vec();
    offered.extend([OPENING, DRY_RUN]);
    offered.extend((!options.waits.retry.is_zero()).then_some(RESUME));
    let mut required = Destination::FEATURES.required.to_vec();
    required.push(OPENING);
    let features = Features { offered: &offered, required: &required };
    let check = |machine: &Machine| {
        let offer = Offer::decode(&machine.opening)?;
        earlier::refuse_domain(&options.state_dir, &libvirt::processes_of(offer.uuid()))?;
        check_free(&connection, &offer)?;
        Ok::<_, String>(offer)
    };
    // Before a migration it is checked on the way: libvirt may need long to answer.
    let refusals = |hello: &Hello| match is_dry_run(hello) {
        true => check(&hello.machine).err().into_iter().collect(),
        false => Offer::decode(&hello.machine.opening).err().into_iter().collect(),
    };
    let handshake = Handshake { takes: &[(Mode::Direct, features)], refusals: &refusals, describe: None };
    let note_declined = |source: &Declined| match source.request {
        SourceRequest::Description => tracing::debug!("{source}"),
        _ => observer.note(&source.to_string()),
    };
    let waiting = Waiting::start(options.wait, cancel)?;
    let no_source = || waiting.no_source("libvirt was asked for nothing");
    let (source, prepared) = loop {
        let mut source = handshake.first(&incoming, &waiting.cancel, note_declined).ok_or_else(no_source)?;
        // Fails where the source is gone, which needs no answer.
        let refuse = |source: &mut AcceptedSource, reason: String| {
            drop(send_message(&mut source.writer, &ControlMessage::Refused(Reason::other(reason))));
        };
        if waiting.cancel.is_cancelled() {
            // The listener has ended with the wait: a source that is lost could not reconnect.
            let error = no_source();
            refuse(&mut source, error.text.clone());
            return Err(error);
        }
        let begin = || {
            let offer = check(&source.machine)?;
            Prepared::begin(&connection, &fifos, &source.machine, &offer, options.xml.as_deref(), cancel)
        };
        match with_heartbeats(&mut source.writer, begin) {
            Ok(prepared) => break (source, prepared),
            Err(reason) => {
                observer.note(&format!("refused: {}: {reason}", source.peer));
                refuse(&mut source, reason);
            }
        }
    };
    let Prepared { mut vmm, guest } = prepared;
    observer.note(&format!("libvirt restores domain {}", vmm.name));
    let record = MonitorRecord {
        mode: Mode::Direct,
        qmp: Monitor::Libvirt { uri: Some(connection.uri().to_owned()), domain: vmm.name.clone() }.name(),
        process: Some(vmm.process),
        source_after: SourceAfter::Keep,
        settings_before: None,
    };
    let taken = Destination::new(guest)
        .memory_before(Before::Written)
        .prefault(options.prefault)
        .monitor(record)
        .stall_limit(Some(options.waits.stall))
        .retry(options.waits.retry)
        .give_up_after(options.waits.total)
        .state_dir(&options.state_dir)
        .take(source, incoming, &address, &mut vmm, cancel, &WithFaultPoints(observer));
    match taken {
        Ok(report) => Ok(report),
        Err(MigrationError { received: Some(report), .. }) => Ok(*report),
        Err(error) => {
            let left = vmm.discard().err().map_or_else(String::new, |error| format!(" ({error})"));
            Err(GatewayError::new(format_args!("libvirt cannot take the guest: {}{left}", error.reason)).of(error.kind))
        }
    }
}

/// The directory of the FIFOs, for this user only. libvirt's daemon, which opens them, is this user or root.
struct Fifos(Directory);

impl Fifos {
    fn open() -> Result<Self, GatewayError> {
        let path = claim::place()?;
        let failed = |error: io::Error| {
            let kind = ErrorKind::of_io(&error, ErrorKind::Settings);
            GatewayError::new(format!("no directory for libvirt's image: {}: {error}", path.display())).of(kind)
        };
        let directory = Directory::private(&path).map_err(failed)?;
        // Of programs that were killed.
        for name in directory.names().unwrap_or_default() {
            if name.to_str().and_then(maker).is_some_and(|pid| process::identity(pid).is_none()) {
                drop(directory.remove(&name));
            }
        }
        Ok(Self(directory))
    }
}

/// Returns the process that has made the FIFO of this name; none of the name of something else.
fn maker(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.rsplit_once('-')?.1.parse().ok()
}

/// A FIFO, which is removed when this is dropped.
struct Fifo {
    path: PathBuf,
}

impl Fifo {
    fn make(fifos: &Fifos, domain: &str) -> Result<Self, String> {
        // One domain of a name is restored at a time.
        let name: String =
            domain.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        let path = fifos.0.path().join(format!("{PREFIX}{name}-{}{SUFFIX}", std::process::id()));
        let failed = |error: io::Error| format!("cannot make the FIFO {}: {error}", path.display());
        let mode = FileMode::RUSR | FileMode::WUSR;
        match mkfifoat(rustix::fs::CWD, &path, mode) {
            Err(Errno::EXIST) => {
                fs::remove_file(&path).map_err(failed)?;
                mkfifoat(rustix::fs::CWD, &path, mode).map_err(|errno| failed(errno.into()))?;
            }
            made => made.map_err(|errno| failed(errno.into()))?,
        }
        Ok(Self { path })
    }

    /// Opens it for writing; none while no process reads it.
    fn open(&self) -> Result<Option<File>, String> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::open(&self.path, flags, FileMode::empty()) {
            Ok(file) => Ok(Some(File::from(file))),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(format!("cannot open the FIFO {}: {errno}", self.path.display())),
        }
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "removing {}", self.path.display());
        }
    }
}

/// A restore that libvirt carries out, on a thread that waits for it.
struct Restore {
    result: Receiver<Result<(), String>>,
    /// Its result, once it has come.
    ended: Option<Result<(), String>>,
}

impl Restore {
    fn start(connection: &Connection, fifo: &Fifo, xml: Option<&str>) -> Result<Self, String> {
        let path = fifo.path.to_str().ok_or("the path of libvirt's image is no text")?.to_owned();
        let (connection, xml) = (connection.clone(), xml.map(str::to_owned));
        let (send, result) = channel();
        let restore = move || {
            let restored = connection.restore_paused(&path, xml.as_deref()).map_err(|error| error.to_string());
            // Fails where the program ends.
            drop(send.send(restored));
        };
        let thread = Builder::new().name("libvirt-restore".into()).spawn(restore);
        thread.map_err(|error| format!("no thread for libvirt's restore: {error}"))?;
        Ok(Self { result, ended: None })
    }

    /// Waits for the result until the deadline; none if it passes.
    fn wait(&mut self, deadline: Instant) -> Option<&Result<(), String>> {
        if self.ended.is_none() {
            self.ended = match self.result.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(result) => Some(result),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Err("the thread of libvirt's restore has ended".into())),
            };
        }
        self.ended.as_ref()
    }

    /// Returns why libvirt has given up, if it has.
    fn failure(&mut self) -> Option<String> {
        match self.wait(Instant::now())? {
            Ok(()) => Some("libvirt has restored the domain before all of it was there".into()),
            Err(reason) => Some(reason.clone()),
        }
    }
}

/// A domain whose QEMU waits for the state of its devices, and its memory.
struct Prepared {
    vmm: LibvirtDestination,
    guest: GuestRam,
}

impl Prepared {
    /// Has libvirt start the domain of a source; `xml`: by this description in place of the source's.
    ///
    /// # Errors
    /// libvirt or QEMU cannot take it. Nothing of it is left on this host then.
    fn begin(
        connection: &Connection,
        fifos: &Fifos,
        machine: &Machine,
        offer: &Offer,
        xml: Option<&str>,
        cancel: &Cancel,
    ) -> Result<Self, String> {
        let image = SavedImage { xml: offer.xml().to_owned(), was_running: true };
        let blocks: Vec<_> =
            machine.blocks.iter().map(|block| BlockLength { name: &block.name, used: block.bytes }).collect();
        let markers = Markers::new(&machine.blocks).map_err(|error| format!("no random numbers: {error}"))?;
        let mut opening = image.encode().map_err(|error| error.to_string())?;
        opening.extend(stream::silent_opening(&machine.machine_type, &blocks)?);
        opening.extend(markers.stream()?);

        let fifo = Fifo::make(fifos, offer.name())?;
        let mut restore = Restore::start(connection, &fifo, xml)?;
        let started = Self::start(&fifo, &mut restore, &opening, &markers, machine, offer.uuid(), cancel);
        match started {
            Ok((image, guest, process)) => {
                let (name, uuid) = (offer.name().to_owned(), offer.uuid().to_owned());
                let connection = connection.clone();
                let (load_ended, image) = (Arc::default(), Some(image));
                let vmm = LibvirtDestination {
                    connection,
                    name,
                    uuid,
                    process,
                    image,
                    restore,
                    _fifo: fifo,
                    load_ended,
                    monitor: None,
                };
                Ok(Self { vmm, guest })
            }
            // With the image's end libvirt's restore fails, and its reason is the better one.
            Err(reason) => {
                let deadline = Instant::now() + ENDING_TIME;
                while restore.wait(Instant::now() + PAUSE).is_none() && Instant::now() < deadline {
                    // libvirt may only now open the image, and would wait for ever for something that writes it.
                    drop(fifo.open());
                }
                Err(match restore.wait(Instant::now()) {
                    Some(Err(libvirts)) if *libvirts == reason => reason,
                    Some(Err(libvirts)) => format!("{libvirts} ({reason})"),
                    Some(Ok(())) => format!("{reason}; end the domain {} (virsh destroy)", offer.name()),
                    None => format!("{reason}; libvirt has not ended its restore of domain {} yet", offer.name()),
                })
            }
        }
    }

    /// Writes the opening, and finds QEMU and its memory. The image ends where this fails.
    fn start(
        fifo: &Fifo,
        restore: &mut Restore,
        opening: &[u8],
        markers: &Markers,
        machine: &Machine,
        uuid: &str,
        cancel: &Cancel,
    ) -> Result<(File, GuestRam, ProcessIdentity), String> {
        let deadline = Instant::now() + OPENING_TIME;
        let image = loop {
            if let Some(image) = fifo.open()? {
                break image;
            }
            go_on(restore, deadline, cancel, "begun to read the image")?;
            std::thread::sleep(PAUSE);
        };
        let deadline = Instant::now() + STARTING_TIME;
        let wanted = || go_on(restore, deadline, cancel, "read the beginning of the image");
        let written = ImageWriter { image: &image, wanted }.write_all(opening);
        written.map_err(|error| format!("the beginning of the image was not read: {error}"))?;
        let (pid, addresses) = loop {
            if let Some(found) = find_qemu(&image, markers)? {
                break found;
            }
            go_on(restore, deadline, cancel, "read the RAM blocks")?;
            std::thread::sleep(PAUSE);
        };
        let pages: Vec<_> = machine.blocks.iter().map(|block| block.page_size).collect();
        let blocks = machine.blocks.iter().zip(addresses).zip(pages);
        let blocks = blocks.map(|((block, address), page)| (block.name.as_str(), block.bytes, page, address));
        let mapped = MappedRam::at(pid, &blocks.collect::<Vec<_>>())?;
        let guest = ram::of_mapped(&mapped)?;
        let identity = u32::try_from(pid).ok().and_then(process::identity).ok_or("QEMU has ended")?;
        // The domain is known by it from now on.
        if !libvirt::has_uuid(pid, uuid) {
            return Err(format!(
                "libvirt has started a domain of another UUID than {uuid}, which the source has offered"
            ));
        }
        Ok((image, guest, identity))
    }
}

/// Checks that no other domain has the name or the UUID, unless it is the same one without a QEMU.
fn check_free(connection: &Connection, offer: &Offer) -> Result<(), String> {
    for named in [offer.name(), offer.uuid()] {
        let Ok(domain) = Domain::find(connection, named) else { continue };
        let state = domain.state().map_err(|error| error.to_string())?;
        let uuid = domain.uuid().map_err(|error| error.to_string())?;
        if uuid != offer.uuid() || state != State::ShutOff {
            return Err(format!(
                "libvirt here has a domain {} already (UUID {uuid}, {state}): end it, or give it another name and UUID",
                domain.name()
            ));
        }
    }
    Ok(())
}

/// Checks that a step may still be waited for.
fn go_on(restore: &mut Restore, deadline: Instant, cancel: &Cancel, doing: &str) -> Result<(), String> {
    if let Some(reason) = restore.failure() {
        return Err(reason);
    }
    if cancel.is_cancelled() {
        return Err("cancelled".into());
    }
    if Instant::now() >= deadline {
        return Err(format!("libvirt and QEMU have not {doing} in time"));
    }
    Ok(())
}

/// Writes to the image, of which QEMU's end decides how fast.
struct ImageWriter<'a, W> {
    image: &'a File,
    /// Returns why nothing more is to be written; asked while the image is not read.
    wanted: W,
}

impl<W: FnMut() -> Result<(), String>> Write for ImageWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let mut image = self.image;
            match image.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (self.wanted)().map_err(io::Error::other)?;
                    // Interrupted: looked at again.
                    let _ = poll(&mut [PollFd::new(image, PollFlags::OUT)], Some(&WRITE_LOOK));
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Finds the process that reads the image and has the RAM blocks, and their addresses; none if there is none yet. libvirt's daemon has the image
/// open as well.
fn find_qemu(image: &File, markers: &Markers) -> Result<Option<(i32, Vec<u64>)>, String> {
    let image = image.metadata().map_err(|error| format!("the FIFO cannot be examined: {error}"))?;
    let processes = fs::read_dir("/proc").map_err(|error| format!("the processes cannot be listed: {error}"))?;
    let own = std::process::id() as i32;
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    for pid in numbers.filter(|pid| *pid != own) {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let is_it = |metadata: fs::Metadata| {
            metadata.file_type().is_fifo() && (metadata.dev(), metadata.ino()) == (image.dev(), image.ino())
        };
        // The name first: to examine a file on a server that does not answer would take for ever.
        let is_named = |link: PathBuf| link.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes());
        let mut paths = files.flatten().map(|file| file.path());
        let reads = paths.any(|path| fs::read_link(&path).is_ok_and(is_named) && fs::metadata(&path).is_ok_and(is_it));
        if reads && let Some(addresses) = markers.find(pid)? {
            return Ok(Some((pid, addresses)));
        }
    }
    Ok(None)
}

/// A domain that libvirt restores.
struct LibvirtDestination {
    connection: Connection,
    name: String,
    uuid: String,
    /// Its QEMU.
    process: ProcessIdentity,
    /// The image, until it has ended.
    image: Option<File>,
    restore: Restore,
    _fifo: Fifo,
    /// Whether loading the devices was ended from outside.
    load_ended: Arc<AtomicBool>,
    /// QEMU's monitor, once the guest runs.
    monitor: Option<Qmp>,
}

impl LibvirtDestination {
    /// Finds the domain that libvirt has restored here; none if its QEMU has ended. Others may have started another domain since, of the same
    /// name or even of the same UUID. libvirt has one QEMU for a UUID at a time: so while ours lives, the domain with its UUID is ours.
    fn restored(&self) -> Result<Option<Domain>, sterna_libvirt::Error> {
        let domain = match Domain::find(&self.connection, &self.uuid) {
            Err(sterna_libvirt::Error::NoDomain { .. }) => None,
            domain => Some(domain?),
        };
        // After libvirt has answered: the process may have ended meanwhile.
        Ok(domain.filter(|_| process::lives(self.process)))
    }

    /// Does something to the domain that was restored; none if its QEMU has ended. Connects to libvirt again where its daemon was restarted,
    /// so that it may be done twice.
    fn with_restored(
        &mut self,
        act: impl Fn(&Domain) -> Result<(), sterna_libvirt::Error>,
    ) -> Result<Option<()>, VmmError> {
        let deadline = Instant::now() + RECONNECTING_TIME;
        loop {
            match self.restored().and_then(|domain| domain.as_ref().map(&act).transpose()) {
                Err(sterna_libvirt::Error::ConnectionLost { .. }) if Instant::now() < deadline => {
                    match libvirt::connection(Some(self.connection.uri())) {
                        Ok(connection) => self.connection = connection,
                        Err(error) => {
                            tracing::debug!(%error, "connecting to libvirt again");
                            std::thread::sleep(RECONNECTING_PAUSE);
                        }
                    }
                }
                done => return done.map_err(|error| error.to_string().into()),
            }
        }
    }

    /// Returns the error for a domain that is not there any more.
    fn gone(&self) -> VmmError {
        format!("the QEMU of domain {} that was restored here has ended, or libvirt has given it up", self.name).into()
    }
}

impl DestinationVmm for LibvirtDestination {
    fn name(&self) -> String {
        format!("QEMU of libvirt {}", self.connection.version())
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        let image = self.image.take().ok_or("the image has ended")?;
        let deadline = Instant::now() + LOADING_TIME;
        let (restore, ended) = (&mut self.restore, Arc::clone(&self.load_ended));
        let is_ended = || ended.load(Ordering::Acquire);
        let cancelled = "it was ended before QEMU had loaded the devices";
        let late = || format!("QEMU and libvirt have not loaded the devices within {} s", LOADING_TIME.as_secs());
        let wanted = || match restore.failure() {
            Some(reason) => Err(reason),
            None if is_ended() => Err(cancelled.into()),
            None if Instant::now() >= deadline => Err(late()),
            None => Ok(()),
        };
        // Where QEMU reads no more, libvirt's reason follows.
        if let Err(error) = stream::close(state, ImageWriter { image: &image, wanted })
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            return Err(error.into());
        }
        drop(image);
        loop {
            let look = (Instant::now() + Duration::from_millis(50)).min(deadline);
            match restore.wait(look) {
                Some(Ok(())) => break,
                Some(Err(reason)) => return Err(format!("the guest could not be loaded: {}", cleaned(reason)).into()),
                None if is_ended() => return Err(cancelled.into()),
                None if Instant::now() >= deadline => return Err(late().into()),
                None => {}
            }
        }
        let domain = self.restored().map_err(|error| error.to_string())?.ok_or_else(|| self.gone())?;
        let state = domain.state().map_err(|error| error.to_string())?;
        if state != State::Paused {
            return Err(format!("libvirt reports domain {} as {state} where it should be paused", self.name).into());
        }
        Ok(())
    }

    fn load_canceller(&self) -> Option<Box<dyn Fn() + Send>> {
        let ended = Arc::clone(&self.load_ended);
        Some(Box::new(move || ended.store(true, Ordering::Release)))
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        // To resume a guest that runs already does nothing.
        self.with_restored(Domain::resume)?.ok_or_else(|| self.gone())
    }

    fn has_ended(&mut self) -> bool {
        !process::lives(self.process)
    }

    fn guest_end(&mut self) -> Option<GuestEnd> {
        self.monitor.as_ref().and_then(qemu::guest_end).filter(|end| end.by_itself)
    }

    fn why_not_running(&mut self) -> Option<String> {
        first_moment::why_not_running(self.monitor.as_ref()?, Some(self.process))
    }

    fn guest_started(&mut self) {
        // Only now: connecting would lengthen the pause.
        let uri = self.connection.uri().to_owned();
        match libvirt::connect(Some(&uri), &self.uuid) {
            Ok(monitor) => {
                qemu::announce(&monitor);
                self.monitor = Some(monitor);
            }
            Err(error) => tracing::warn!(%error, "the guest's addresses were not announced"),
        }
    }

    fn discard(&mut self) -> Result<(), VmmError> {
        // libvirt's restore fails with the image's end, and leaves no domain.
        self.image = None;
        match self.restore.wait(Instant::now() + ENDING_TIME) {
            Some(Err(reason)) => {
                tracing::debug!(reason, "libvirt's restore has ended");
                Ok(())
            }
            Some(Ok(())) | None => self.with_restored(|domain| domain.destroy(Destroy::Forced)).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_fifos_of_programs_that_have_ended_are_removed() {
        assert_eq!(maker("libvirt-web_1-4711.image"), Some(4711));
        assert_eq!(maker("libvirt-web.image"), None);
        assert_eq!(maker("qemu-1-2.lock"), None);
    }

    #[test]
    fn writing_ends_where_it_is_not_wanted_any_more_and_where_nothing_reads() {
        let scratch = tempfile::tempdir().unwrap();
        let fifo = Fifo { path: scratch.path().join("image") };
        mkfifoat(rustix::fs::CWD, &fifo.path, FileMode::RWXU).unwrap();
        assert!(fifo.open().unwrap().is_none());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let reader = rustix::fs::open(&fifo.path, flags, FileMode::empty()).unwrap();
        let image = fifo.open().unwrap().expect("it is read");
        let mut asked = 0;
        let wanted = || {
            asked += 1;
            if asked < 3 { Ok(()) } else { Err("cancelled".to_owned()) }
        };
        // More than a pipe holds.
        let error = ImageWriter { image: &image, wanted }.write_all(&vec![0; 1 << 20]).unwrap_err();
        assert_eq!((error.to_string().as_str(), asked), ("cancelled", 3));
        drop(reader);
        let error = ImageWriter { image: &image, wanted: || Ok(()) }.write_all(&[0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
