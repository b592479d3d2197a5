//! The source QEMU as the library's `SourceVmm`.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{MemfdFlags, Mode, OFlags};
use serde_json::json;
use sterna_engine::source::MonitorRecord;
use sterna_engine::vmm::{AfterMove, GuestEnd, ResumeReason, SourceVmm, VmmError};
use sterna_memory::ram::GuestRam;
use sterna_wire::switchover::SourceAfter;

use super::ram::Watched;
use super::stream::has_nested_guest;
use super::throttle::VcpuThrottle;
use crate::gateway::fault::{self, PausePoint};
use crate::gateway::neighbours::{self, Media};
use crate::gateway::qemu::{self, SOURCE_QUIT_TIME};
use crate::gateway::storage::{Patience, Storage, StorageError};
use crate::qmp::{Event, Meaning, PendingCommand, Qmp, QmpError, RunState};

/// How long to wait for the guest's disks when the guest is to continue here: until the destination's QEMU is ended.
const DISKS_TIME: Duration = Duration::from_secs(30);
/// Pause between two attempts to resume the guest.
const DISKS_PAUSE: Duration = Duration::from_millis(50);
/// Typical bytes of a small machine's device state.
const USUAL_STATE: u64 = 128 << 10;
/// Maximum bytes of the devices' state, all of which is held in memory. The largest known part of a state is the pictures of a virtio-gpu,
/// whose `max_hostmem` is 256 MiB by default.
const MAX_STATE: u64 = 512 << 20;

/// Why the state that QEMU has saved of its devices cannot be sent.
#[derive(Debug, thiserror::Error)]
enum StateError {
    /// There is more of it than this process holds in memory.
    #[error(
        "the state of QEMU's devices has more than {limit_mib} MiB, the maximum in direct mode: use --mode stream",
        limit_mib = .limit >> 20
    )]
    TooLarge {
        /// Maximum bytes.
        limit: u64,
    },
    /// The file in which QEMU saved the state cannot be read.
    #[error("the state of QEMU's devices cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

/// A source QEMU whose memory is read from outside.
pub(super) struct QemuSource<'a> {
    qmp: Qmp,
    machine_type: String,
    /// Its RAM, and the conditions for complete tracking, which are checked when the guest has stopped.
    guest: GuestRam,
    watched: Watched,
    /// The media of its drives at the start.
    media: Media,
    /// The storage of its disks.
    storage: Storage<'a>,
    record: MonitorRecord,
    /// This migration has stopped the guest.
    stopped: bool,
    /// The devices' state, once the guest is stopped.
    state: Option<Vec<u8>>,
    /// What QEMU was asked once the devices were saved: blocks of RAM, devices (two lists), drives, nodes. QEMU takes some milliseconds to answer
    /// for a machine with many devices. Meanwhile the state travels, so that the pause is not longer for it. Looked at before the decision.
    asked: Option<[PendingCommand; 5]>,
    longest_settling: Duration,
    /// Slows the guest down as long as it is there.
    throttle: Option<VcpuThrottle>,
}

impl<'a> QemuSource<'a> {
    pub(super) fn new(
        qmp: Qmp,
        machine_type: String,
        guest: GuestRam,
        watched: Watched,
        media: Media,
        storage: Storage<'a>,
        record: MonitorRecord,
    ) -> Self {
        let longest_settling = Duration::ZERO;
        Self {
            qmp,
            machine_type,
            guest,
            watched,
            media,
            storage,
            record,
            stopped: false,
            state: None,
            asked: None,
            longest_settling,
            throttle: None,
        }
    }

    /// Returns the longest time that the block layer took to finish its requests.
    pub(super) fn longest_settling(&self) -> Duration {
        self.longest_settling
    }

    /// Resumes the guest, as soon as the storage of its disks lets QEMU do that. Saving its devices released its disks, and another process
    /// may have locked an image meanwhile.
    fn take_back(&self) -> Result<(), VmmError> {
        let mut deadline = None;
        let mut warned = false;
        let state = self.storage.run_state(&self.qmp, Patience::Endless)?;
        if state.meaning() == Meaning::Migrated {
            return Err(format!(
                "another program has migrated the guest while it was paused (QEMU: {state}): it may run where that program has moved it to, so \
                 it was not resumed here; end this QEMU if it does, else resume the guest (QMP cont)"
            )
            .into());
        }
        loop {
            match self.storage.cont(&self.qmp, Patience::Endless) {
                Ok(()) => return Ok(()),
                Err(StorageError::Qmp(error @ QmpError::Refused { .. })) if is_lock_error(&error.to_string()) => {
                    // Slow storage before the refusal does not count.
                    if Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + DISKS_TIME) {
                        return Err(format!(
                            "{error}: another process has used a disk of the guest for {} s; end that process, then run `sterna recover`",
                            DISKS_TIME.as_secs()
                        )
                        .into());
                    }
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(%error, "another process uses a disk of the guest: waiting until the guest can run");
                    }
                    std::thread::sleep(DISKS_PAUSE);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Checks that no other program has begun something that does not go together with moving the guest.
    fn check_neighbours(&self) -> Result<(), String> {
        neighbours::check_jobs(&self.qmp)?;
        neighbours::check_migration(&self.qmp)?;
        Ok(())
    }

    fn check_running(&self) -> Result<(), VmmError> {
        match self.qmp.status()?.as_str() {
            "running" => Ok(()),
            // The destination starts every guest that it receives, so a guest that an operator paused, or that stopped by itself, must
            // stay here.
            other => {
                Err(format!("the guest stopped during the migration (QEMU: {other}); only a running guest is moved")
                    .into())
            }
        }
    }

    /// Stops the guest.
    ///
    /// # Errors
    /// The storage of its disks does not let QEMU stop it in time, or another program, or the guest itself, has changed whether it runs: it is
    /// left as it is then.
    fn stop(&mut self, patience: Patience) -> Result<(), VmmError> {
        self.stopped = true;
        let asked = microseconds_now();
        self.storage.execute(&self.qmp, "stop", json!({}), patience)?;
        let answered = microseconds_now();
        match who_stopped(&self.qmp.take_events(&["STOP", "RESUME"]), asked..=answered) {
            StoppedBy::Us => Ok(()),
            StoppedBy::Others => {
                self.stopped = false;
                let state = self.qmp.run_state()?;
                Err(format!(
                    "another program stopped the guest just before it was to be paused for its switchover, or it stopped by itself (QEMU: \
                     {state}): it is left so; only a running guest is moved"
                )
                .into())
            }
            StoppedBy::RunsAgain => {
                self.stopped = false;
                Err(resumed_by_others(self.qmp.run_state()?.name()).into())
            }
        }
    }

    /// Checks the guest, which is paused, and saves its devices. Then asks QEMU what [`QemuSource::check_answers`] checks.
    fn check_and_save(&mut self, patience: Patience) -> Result<Vec<u8>, VmmError> {
        let begun = Instant::now();
        self.check_neighbours()?;
        let checked = begun.elapsed();
        let state = self.save_devices(patience)?;
        let begun = Instant::now();
        let [blocks, named, unnamed] = Watched::ask(&self.qmp)?;
        self.asked = Some([blocks, named, unnamed, Media::ask(&self.qmp)?, neighbours::ask_nodes(&self.qmp)?]);
        tracing::debug!(?checked, asking = ?begun.elapsed(), "QEMU was looked at in the pause");
        if has_nested_guest(&state) {
            return Err(
                "the guest runs guests of its own, whose hardware pages are not tracked: use --mode stream".into()
            );
        }
        Ok(state)
    }

    /// Checks that the guest's memory, devices, drives and nodes were as they have to be once its devices were saved. Waits for QEMU's answers.
    fn check_answers(&mut self) -> Result<(), VmmError> {
        let Some(mut asked) = self.asked.take() else { return Ok(()) };
        let begun = Instant::now();
        let [blocks, named, unnamed, drives, nodes] = self.qmp.answers(&mut asked)?;
        self.watched.check_answers(&[blocks, named, unnamed], &self.guest)?;
        self.media.check_answer(&drives)?;
        let inactive = neighbours::check_inactive(&self.qmp, &nodes, &drives);
        tracing::debug!(took = ?begun.elapsed(), "QEMU's answers were waited for and checked");
        Ok(inactive?)
    }

    /// Returns the error for a paused guest that another program has resumed; none if no program has. That program is responsible for the guest
    /// from then on. What failed meanwhile may only follow from that: disks are in use again, for example.
    fn resumed_meanwhile(&mut self) -> Option<VmmError> {
        if !self.stopped || self.qmp.take_events(&["RESUME"]).is_empty() {
            return None;
        }
        self.stopped = false;
        let state = self.qmp.run_state().map_or_else(|error| error.to_string(), |state| state.to_string());
        Some(resumed_by_others(&state).into())
    }

    fn save_devices(&self, patience: Patience) -> Result<Vec<u8>, VmmError> {
        let file = File::from(rustix::fs::memfd_create("sterna-devices", MemfdFlags::CLOEXEC)?);
        // QEMU uses a descriptor of its set only if the access mode is exactly the requested one.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let for_qemu = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        let added = self.qmp.execute_with_descriptor("add-fd", json!({ "opaque": "sterna" }), for_qemu.as_fd())?;
        let set = added["fdset-id"].as_u64().ok_or("QEMU does not name the set of a descriptor")?;
        let arguments = json!({ "filename": format!("/dev/fdset/{set}"), "live": true });
        let saved = self.storage.execute(&self.qmp, "xen-save-devices-state", arguments, patience);
        // Not waited for: QEMU may still be saving.
        if let Err(error) = self.qmp.begin("remove-fd", json!({ "fdset-id": set })) {
            tracing::debug!(%error, "remove-fd");
        }
        saved?;
        let mut file = file;
        file.rewind()?;
        Ok(read_state(file, MAX_STATE)?)
    }
}

impl SourceVmm for QemuSource<'_> {
    fn name(&self) -> String {
        format!("QEMU {}", self.qmp.version())
    }

    fn machine_type(&self) -> String {
        self.machine_type.clone()
    }

    fn check_migratable(&mut self) -> Result<(), VmmError> {
        self.watched.check(&self.qmp, &self.guest)?;
        self.check_neighbours()?;
        Ok(self.media.check(&self.qmp)?)
    }

    fn settle_io(&mut self) -> Result<(), VmmError> {
        fault::at(PausePoint::Round);
        if fault::without_settling() {
            return Ok(());
        }
        let begun = Instant::now();
        tracing::debug!("waiting until QEMU's block layer has nothing under way");
        // `transaction` drains all of the block layer before it processes its actions (`qmp_transaction` in blockdev.c).
        let settled = self.storage.execute(&self.qmp, "transaction", json!({ "actions": [] }), Patience::of_a_step());
        let took = begun.elapsed();
        self.longest_settling = self.longest_settling.max(took);
        match settled {
            Ok(_) => {
                tracing::debug!(?took, "QEMU's block layer has nothing under way");
                Ok(())
            }
            Err(StorageError::Silent { disks, waited, .. }) => Err(format!(
                "the storage of the guest's disks has not answered within {:.1} s ({disks}); the guest is not stopped, but it and QEMU's \
                 monitor wait for this storage whenever they use a device; see to the storage and send again, or use --mode stream",
                waited.as_secs_f64()
            )
            .into()),
            Err(error) => Err(error.into()),
        }
    }

    fn may_pause(&mut self) -> Result<(), VmmError> {
        self.check_running()?;
        // What has changed since the last round ends the migration without a pause.
        self.check_migratable()
    }

    fn confirm_paused(&mut self) -> Result<(), VmmError> {
        // QEMU sends RESUME before the guest's vCPUs start, and in order with its answers.
        let state = self.qmp.run_state()?;
        if let Some(error) = self.resumed_meanwhile() {
            return Err(error);
        }
        // QEMU carries out here what the guest requested just before it was stopped; with `-no-shutdown` the state stays `paused`.
        if let Some(end) = qemu::ended_by_itself(&self.qmp) {
            return Err(end.into());
        }
        match state.meaning() {
            Meaning::Stopped if state.name() == "paused" => {
                self.check_answers()?;
                Ok(neighbours::check_still_inactive(&self.qmp)?)
            }
            // A reset that the guest requested just before it was stopped is carried out here and would be lost at the destination, where
            // the guest would wait for it for ever. `prelaunch` is the state after it; `cont` lets the guest boot.
            Meaning::Stopped if !state.has_executed() => Err(format!(
                "the guest was reset while it was paused for its switchover (QEMU: {state}): it goes on here; send again"
            )
            .into()),
            Meaning::Executes | Meaning::Stopped => {
                // Another program resumed the guest and is now responsible for whether it runs.
                self.stopped = false;
                Err(format!(
                    "another program let the guest run while it was paused for its switchover, or it had stopped by itself (QEMU: {state})"
                )
                .into())
            }
            _ => Err(format!("QEMU is {state} where its guest was paused for its switchover").into()),
        }
    }

    fn changed_by_others(&mut self) -> Option<VmmError> {
        let answered = self.asked.as_ref().is_some_and(|asked| asked.iter().all(PendingCommand::is_answered));
        self.resumed_meanwhile().or_else(|| answered.then(|| self.check_answers().err()).flatten())
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        // Before the state is looked at, so that every change after that is seen.
        self.qmp.clear_events();
        self.check_running()?;
        // The throttle ends first: in `stop`, QEMU waits for each vCPU thread.
        self.throttle = None;
        let patience = Patience::of_a_step();
        fault::at(PausePoint::BeforeStop);
        self.stop(patience)?;
        fault::at(PausePoint::Stopped);
        let saved = self.check_and_save(patience);
        if let Some(error) = self.resumed_meanwhile() {
            return Err(error);
        }
        self.state = Some(saved?);
        fault::at(PausePoint::Saved);
        Ok(())
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        (self.state, self.asked, self.throttle) = (None, None, None);
        if let Some(end) = qemu::ended_by_itself(&self.qmp) {
            return Err(end.into());
        }
        if self.stopped {
            self.take_back()?;
            self.stopped = false;
            if reason != ResumeReason::RoundsGoOn {
                // The switches may have learned the other host's port.
                qemu::announce(&self.qmp);
            }
        }
        Ok(())
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        fault::at(PausePoint::SendingState);
        let saved = self.state.as_ref().ok_or("the guest was not stopped")?;
        Ok(state.write_all(saved)?)
    }

    fn state_size(&self) -> u64 {
        USUAL_STATE
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmmError> {
        let throttle = self.throttle.take();
        self.throttle = match (percent, throttle) {
            (0, _) => None,
            (percent, None) => Some(VcpuThrottle::begin(&self.qmp, percent)?),
            (percent, Some(throttle)) => Some(throttle.set(&self.qmp, percent)?),
        };
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        qemu::monitor_has_ended(&self.qmp, self.record.process)
    }

    fn guest_end(&mut self) -> Option<GuestEnd> {
        qemu::guest_end(&self.qmp)
    }

    fn guest_moved(&mut self) -> Result<AfterMove, VmmError> {
        self.after_move(self.record.source_after)
    }

    fn guest_does_not_run(&mut self) -> Result<AfterMove, VmmError> {
        self.after_move(SourceAfter::Keep)
    }
}

impl QemuSource<'_> {
    fn after_move(&self, source_after: SourceAfter) -> Result<AfterMove, VmmError> {
        let state = self.qmp.run_state();
        match state.as_ref().map(RunState::meaning) {
            // Another program has resumed it, and it may have stopped by itself since.
            _ if state.as_ref().is_ok_and(RunState::has_executed) => return Ok(AfterMove::RunsHere),
            // Also a guest that was reset while it was paused. A QEMU that does not answer is ended as well.
            Ok(Meaning::Stopped) | Err(_) => {}
            Ok(_) => {
                let state = state.map_or_else(|error| error.to_string(), |state| state.to_string());
                return Err(format!(
                    "the source's QEMU is {state}, in which no migration of Sterna leaves it, so that it was not ended"
                )
                .into());
            }
        }
        match source_after {
            SourceAfter::Keep => Ok(AfterMove::Kept),
            SourceAfter::Quit => {
                qemu::quit(&self.qmp, self.record.process, SOURCE_QUIT_TIME)?;
                Ok(AfterMove::Ended)
            }
        }
    }
}

/// Reads a state of at most `limit` bytes. QEMU may still hold the file and change its length, so memory is reserved only for bytes that were
/// read.
fn read_state(file: impl Read, limit: u64) -> Result<Vec<u8>, StateError> {
    let mut state = Vec::new();
    // `Take`, unlike `File`, does not ask for the file's length.
    file.take(limit.saturating_add(1)).read_to_end(&mut state)?;
    if state.len() as u64 > limit {
        return Err(StateError::TooLarge { limit });
    }
    Ok(state)
}

/// Returns whether QEMU's error is that another process has locked an image (`raw_check_lock_bytes` and `raw_apply_lock_bytes` in
/// block/file-posix.c).
fn is_lock_error(error: &str) -> bool {
    error.contains("\" lock") || error.contains("Failed to lock byte")
}

/// Who has stopped the guest, once `stop` was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoppedBy {
    /// This migration, as far as QEMU shows it.
    Us,
    /// Another program, or the guest itself, before `stop` was sent.
    Others,
    /// No program: another one has let the guest run again.
    RunsAgain,
}

/// Returns who has stopped the guest. `events`: STOP and RESUME since it was last seen running. `stop`: when that was sent and answered, in
/// microseconds since 1970, by the clock of QEMU's host, which is this one.
///
/// QEMU sends STOP only when the guest stops (`do_vm_stop` in system/cpus.c), so one `stop` after another leaves no trace. Of two at the same
/// time only the event's time tells whose it is; one that QEMU has executed between the sending of ours and its execution counts as ours.
fn who_stopped(events: &[Event], stop: RangeInclusive<u64>) -> StoppedBy {
    let Some(last) = events.last() else { return StoppedBy::Us };
    if last.name == "RESUME" {
        return StoppedBy::RunsAgain;
    }
    match last.time_us {
        // A range that is empty shows a clock that was set back: its times mean nothing.
        Some(time) if time < *stop.start() && !stop.is_empty() => StoppedBy::Others,
        _ => StoppedBy::Us,
    }
}

fn microseconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

/// Returns the error for a guest that another program has let run while this migration had it paused.
fn resumed_by_others(state: &str) -> String {
    format!(
        "another program let the guest run (QMP cont, virsh resume) while it was paused for its switchover: that program is responsible for it \
         now (QEMU: {state}); send again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 1 << 20;

    fn file_of(length: u64) -> File {
        let file = File::from(rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(length).unwrap();
        file
    }

    #[test]
    fn a_stop_belongs_to_another_program_only_where_qemu_stopped_the_guest_before_ours_was_sent() {
        let events = |list: &[(&str, Option<u64>)]| -> Vec<Event> {
            let event = |(name, time_us): &(&str, Option<u64>)| Event {
                name: (*name).to_owned(),
                data: serde_json::Value::Null,
                time_us: *time_us,
            };
            list.iter().map(event).collect()
        };
        let who = |list: &[(&str, Option<u64>)]| who_stopped(&events(list), 100..=200);
        assert_eq!(who(&[("STOP", Some(150))]), StoppedBy::Us);
        assert_eq!(who(&[("STOP", Some(99))]), StoppedBy::Others);
        assert_eq!(who(&[("STOP", Some(90)), ("RESUME", Some(95)), ("STOP", Some(120))]), StoppedBy::Us);
        assert_eq!(who(&[("STOP", Some(120)), ("RESUME", Some(130))]), StoppedBy::RunsAgain);
        // Where the time is not known the guest is taken back rather than left paused by mistake.
        assert_eq!(who(&[("STOP", None)]), StoppedBy::Us);
        assert_eq!(who(&[]), StoppedBy::Us);
        // The clock was set back meanwhile.
        let set_back = who_stopped(&events(&[("STOP", Some(50))]), RangeInclusive::new(100, 60));
        assert_eq!(set_back, StoppedBy::Us);
    }

    #[test]
    fn a_state_is_read_up_to_the_limit() {
        for length in [0, 1, LIMIT - 1, LIMIT] {
            assert_eq!(read_state(file_of(length), LIMIT).unwrap().len() as u64, length);
        }
        let error = read_state(file_of(LIMIT + 1), LIMIT).unwrap_err();
        assert!(matches!(error, StateError::TooLarge { limit: LIMIT }), "{error}");
        let text = "the state of QEMU's devices has more than 1 MiB, the maximum in direct mode: use --mode stream";
        assert_eq!(error.to_string(), text);
    }

    /// Counts the bytes that are read.
    struct Counted<R>(R, u64);

    impl<R: Read> Read for Counted<R> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let read = self.0.read(buffer)?;
            self.1 += read as u64;
            Ok(read)
        }
    }

    #[test]
    fn of_a_state_that_is_too_large_only_the_limit_is_read() {
        // A sparse file, and one that grows for ever.
        let mut sparse = Counted(file_of(1 << 40), 0);
        assert!(matches!(read_state(&mut sparse, LIMIT), Err(StateError::TooLarge { .. })));
        let mut endless = Counted(io::repeat(7), 0);
        assert!(matches!(read_state(&mut endless, LIMIT), Err(StateError::TooLarge { .. })));
        assert_eq!((sparse.1, endless.1), (LIMIT + 1, LIMIT + 1));
    }

    #[test]
    fn the_length_of_a_file_reserves_no_memory() {
        /// As a file that was long when its length was taken, and was cut since.
        struct Cut(File);
        impl Read for Cut {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.set_len(3)?;
                self.0.read(buffer)
            }
        }
        let state = read_state(Cut(file_of(LIMIT)), LIMIT).unwrap();
        assert!(state.len() == 3 && (state.capacity() as u64) < LIMIT, "{}", state.capacity());
    }
}
