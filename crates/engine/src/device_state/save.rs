//! Devices at the source: a thread for each, and the state that it shares with the channels, the rounds and the driver.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_wire::device::{DeviceError, DeviceSender, Piece};
use sterna_wire::reason::{ErrorKind, Reason};

use super::{Ahead, DeviceId, DevicePhase, SaveDevice, Threads, unless_it_panics};
use crate::device_bytes::{Buffers, DeviceBytes};
use crate::entry::Pipeline;
use crate::item::Item;
use crate::report::{DeviceProgress, DeviceReport, between};
use crate::send::{PieceArrivals, SendChannel};
use crate::vmm::VmmError;
use crate::window::WindowClosed;

/// Minimum bytes over which the rate of sending or loading state is measured.
const MIN_BYTES: u64 = 1 << 20;
/// Minimum time over which it is measured: in a shorter time so much may come out of buffers at once.
const MIN_MEASURE: Duration = Duration::from_millis(20);

/// An order to a device's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Save ahead what there is more, if anything.
    SaveMoreAhead,
    /// Save: the guest is paused.
    Save,
}

/// A message of a device's thread to the driver.
#[derive(Debug)]
pub(crate) enum SaveEvent {
    /// This device has saved nothing ahead, so nothing must be loaded before the guest is stopped.
    NothingAhead(u16),
    /// All of the device's state is handed over.
    Saved,
    /// Saving has failed, with the reason.
    Failed(Reason),
}

/// The state of one device.
#[derive(Debug, Default)]
struct DeviceState {
    sender: DeviceSender,
    order: Option<Order>,
    /// Whether the device may have more to save ahead.
    more_ahead: bool,
    remaining: u64,
    ahead_bytes: u64,
    bytes: u64,
    pieces: u64,
    arrived_bytes: u64,
    arrived_pieces: u64,
    /// Whether its thread waits with a piece for the destination's permission or for a channel, or is handing one over.
    handing_over: bool,
    /// Whether all that was saved ahead at first is handed over.
    first_sent: bool,
    /// Whether the destination's device has loaded what was saved ahead at first.
    loaded_ahead: bool,
    /// Since when the destination's device has bytes to load, and how many it had loaded by then.
    consuming: Option<(Instant, u64)>,
    /// Bytes per second that the destination's device loads, by the last measurement; 0 before.
    consume_rate: f64,
    begun: Option<Instant>,
    saved: Option<Instant>,
    arrived: Option<Instant>,
    loaded: Option<Instant>,
}

impl DeviceState {
    /// Returns how long the destination's device will take to load what was sent; zero while its rate is unknown.
    fn loading(&self) -> Duration {
        let time = self.sender.not_loaded() as f64 / self.consume_rate;
        if self.consume_rate > 0.0 { Duration::from_secs_f64(time.min(1e9)) } else { Duration::ZERO }
    }

    fn update_consume_rate(&mut self) {
        let Some((since, before)) = self.consuming else { return };
        let (loaded, elapsed) = (self.sender.loaded() - before, since.elapsed());
        if loaded >= MIN_BYTES && elapsed >= MIN_MEASURE {
            self.consume_rate = loaded as f64 / elapsed.as_secs_f64();
        }
        if self.sender.not_loaded() == 0 {
            self.consuming = None;
        }
    }

    /// Returns the phase of the device. `paused`: the guest is paused, and the device has the order to save.
    fn phase(&self, paused: bool, downtime: Duration) -> DevicePhase {
        // `there`, once all pieces have arrived at the destination.
        let sent = |there| if self.arrived_pieces == self.pieces { there } else { DevicePhase::OnTheWay };
        if self.loaded.is_some() {
            DevicePhase::Loaded
        } else if paused && (self.saved.is_some() || self.handing_over) {
            sent(DevicePhase::Loading)
        } else if paused {
            DevicePhase::Saving
        } else if self.loaded_ahead && self.loading() <= downtime {
            DevicePhase::Ready
        } else if self.first_sent || self.loaded_ahead || self.handing_over {
            sent(DevicePhase::LoadingAhead)
        } else {
            DevicePhase::SavingAhead
        }
    }

    fn note_arrival(&mut self) {
        if self.saved.is_some() && self.arrived_pieces == self.pieces {
            self.arrived.get_or_insert_with(Instant::now);
        }
    }
}

#[derive(Debug)]
struct State {
    devices: Vec<DeviceState>,
    /// The target downtime.
    downtime: Duration,
    /// Which device saves now, where one saves after the other.
    turn: Option<usize>,
    /// Whether the destination has loaded what the monitor has saved ahead, or the monitor has saved nothing ahead.
    monitor_loaded_ahead: bool,
    /// Whether the guest is paused and all devices have the order to save.
    paused: bool,
    /// Pieces of all devices that have been sent and have not arrived.
    on_the_way: u64,
    /// Since when pieces are on their way, and the bytes that have arrived since.
    busy: Option<(Instant, u64)>,
    /// Bytes per second that arrive, by the last measurement; 0 before.
    rate: f64,
    over: bool,
}

impl State {
    /// Returns the phase of each device.
    fn phases(&self) -> impl Iterator<Item = DevicePhase> {
        // Whether all devices before this one are loaded, where one device goes after the other.
        let mut comes_next = true;
        self.devices.iter().enumerate().map(move |(number, known)| {
            let phase = known.phase(self.paused, self.downtime);
            let waits = self.turn.is_some_and(|turn| match phase {
                DevicePhase::Saving => number > turn,
                DevicePhase::Loading => !comes_next,
                _ => false,
            });
            comes_next &= phase == DevicePhase::Loaded;
            if waits { DevicePhase::Ready } else { phase }
        })
    }

    /// Returns the device, if it exists and the migration has not ended: later messages about it are an echo of the end.
    fn in_time(&mut self, device: u16) -> Option<&mut DeviceState> {
        self.devices.get_mut(usize::from(device)).filter(|_| !self.over)
    }

    fn piece_sent(&mut self) {
        self.on_the_way += 1;
        self.busy.get_or_insert_with(|| (Instant::now(), 0));
    }

    fn piece_arrived(&mut self, bytes: u64) {
        self.on_the_way -= 1;
        let Some((since, arrived)) = &mut self.busy else { return };
        *arrived += bytes;
        let elapsed = since.elapsed();
        // Measured from the beginning on: a burst after a delay says nothing without the delay.
        if *arrived >= MIN_BYTES && elapsed >= MIN_MEASURE {
            self.rate = *arrived as f64 / elapsed.as_secs_f64();
        }
        if self.on_the_way == 0 {
            self.busy = None;
        }
    }
}

/// The devices of one migration at the source.
#[derive(Debug)]
pub(crate) struct SavingDevices {
    ids: Vec<DeviceId>,
    state: Mutex<State>,
    changed: Condvar,
}

impl PieceArrivals for SavingDevices {
    fn arrived(&self, device: u16, bytes: u32) {
        let mut state = self.state();
        state.piece_arrived(bytes.into());
        let known = &mut state.devices[usize::from(device)];
        known.arrived_bytes += u64::from(bytes);
        known.arrived_pieces += 1;
        known.note_arrival();
    }
}

impl SavingDevices {
    pub(crate) fn new(ids: Vec<DeviceId>, serial: bool, downtime: Duration) -> Self {
        let devices = ids.iter().map(|_| DeviceState::default()).collect();
        let turn = serial.then_some(0);
        let state = State {
            devices,
            downtime,
            turn,
            monitor_loaded_ahead: false,
            paused: false,
            on_the_way: 0,
            busy: None,
            rate: 0.0,
            over: false,
        };
        Self { ids, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the lock held")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).expect("no thread panics with the lock held")
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Records that the destination permits `up_to` bytes of a device's state in all.
    ///
    /// # Errors
    /// There is no such device, or nothing can be sent with so little.
    pub(crate) fn credit(&self, device: u16, up_to: u64) -> Result<(), String> {
        let mut state = self.state();
        let known = state.devices.get_mut(usize::from(device));
        let known = known.ok_or_else(|| format!("the destination names a device {device}, which does not exist"))?;
        known.sender.credit(up_to).map_err(|error: DeviceError| error.to_string())?;
        known.update_consume_rate();
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the destination's device has loaded what was saved ahead, or that nothing was.
    pub(crate) fn loaded_ahead(&self, device: u16) {
        if let Some(known) = self.state().in_time(device) {
            known.loaded_ahead = true;
        }
    }

    /// As [`SavingDevices::loaded_ahead`], for the monitor's own state.
    pub(crate) fn monitor_loaded_ahead(&self) {
        self.state().monitor_loaded_ahead = true;
    }

    /// Returns whether everything that was saved ahead at first has been loaded.
    pub(crate) fn all_loaded_ahead(&self) -> bool {
        let state = self.state();
        state.monitor_loaded_ahead && state.devices.iter().all(|known| known.loaded_ahead)
    }

    /// Sets the target downtime.
    pub(crate) fn set_downtime(&self, downtime: Duration) {
        self.state().downtime = downtime;
    }

    /// Lists the devices that the migration waits for, and the monitor before the guest is stopped; none where it waits for neither.
    pub(crate) fn waiting_for(&self) -> Option<String> {
        let state = self.state();
        let monitor =
            (!state.monitor_loaded_ahead).then_some((&"the monitor" as &dyn Display, DevicePhase::LoadingAhead));
        let devices = self.ids.iter().map(|id| id as &dyn Display).zip(state.phases());
        super::waiting_for(monitor.into_iter().chain(devices))
    }

    /// Records that the destination's device has loaded all of its state.
    pub(crate) fn loaded(&self, device: u16) {
        if let Some(known) = self.state().in_time(device) {
            known.loaded.get_or_insert_with(Instant::now);
        }
    }

    /// Returns the bytes of state that would have to be saved if the guest were stopped now.
    pub(crate) fn remaining(&self) -> u64 {
        // Saturating: a device that does not know its size may return any number.
        self.state().devices.iter().fold(0, |sum, known| sum.saturating_add(known.remaining))
    }

    /// Returns how long the destination's devices will take to load what was sent already.
    pub(crate) fn loading(&self) -> Duration {
        self.state().devices.iter().map(DeviceState::loading).max().unwrap_or_default()
    }

    /// Returns how fast state arrives, in bytes per second; 0 before enough of it has arrived.
    pub(crate) fn rate(&self) -> f64 {
        self.state().rate
    }

    /// Orders the devices that may have more to save ahead to save it.
    pub(crate) fn look(&self) {
        self.order(|known| (known.more_ahead && known.order.is_none()).then_some(Order::SaveMoreAhead));
    }

    /// Orders all devices to save: the guest is paused.
    pub(crate) fn save(&self) {
        self.state().paused = true;
        self.order(|_| Some(Order::Save));
    }

    fn order(&self, order: impl Fn(&DeviceState) -> Option<Order>) {
        let mut state = self.state();
        for known in &mut state.devices {
            known.order = order(known).or(known.order);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns none while a device has not saved; else when the last device has, which is none without devices.
    pub(crate) fn all_saved(&self) -> Option<Option<Instant>> {
        let state = self.state();
        let saved: Option<Vec<Instant>> = state.devices.iter().map(|known| known.saved).collect();
        saved.map(|saved| saved.into_iter().max())
    }

    /// Waits until all devices have saved, or fails where the migration is being taken down.
    pub(crate) fn await_saved(&self) -> Result<(), WindowClosed> {
        if self.is_empty() {
            return Ok(());
        }
        let mut state = self.state();
        while !state.over && state.devices.iter().any(|known| known.saved.is_none()) {
            state = self.wait(state);
        }
        if state.over { Err(WindowClosed) } else { Ok(()) }
    }

    /// Returns whether the devices' state goes on the stream channel, where the monitor's state follows that of the last device.
    pub(crate) fn precede_monitor(&self) -> bool {
        !self.is_empty() && self.state().turn.is_some()
    }

    /// Ends all waits here: the migration has ended or is being taken down.
    pub(crate) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// Waits for the next order; none at the end.
    fn next_order(&self, device: usize) -> Option<Order> {
        let mut state = self.state();
        loop {
            if state.over {
                return None;
            }
            if let Some(order) = state.devices[device].order.take() {
                return Some(order);
            }
            state = self.wait(state);
        }
    }

    /// Waits for the device's turn, where one saves after the other.
    fn await_turn(&self, device: usize) -> Result<(), WindowClosed> {
        let mut state = self.state();
        while !state.over && state.turn.is_some_and(|turn| turn != device) {
            state = self.wait(state);
        }
        if state.over { Err(WindowClosed) } else { Ok(()) }
    }

    /// Waits until the destination permits a piece, and returns the maximum bytes of one.
    fn largest_piece(&self, device: usize, packet: usize) -> Result<usize, WindowClosed> {
        let mut state = self.state();
        loop {
            if state.over {
                return Err(WindowClosed);
            }
            let known = &mut state.devices[device];
            let most = known.sender.largest_piece(packet);
            known.handing_over = most.is_none();
            if let Some(most) = most {
                return Ok(most);
            }
            state = self.wait(state);
        }
    }

    /// Waits until the destination has room for the next piece, and returns the place of the piece.
    fn place(&self, device: usize, content: usize) -> Result<u64, WindowClosed> {
        let mut state = self.state();
        loop {
            if state.over {
                return Err(WindowClosed);
            }
            let known = &mut state.devices[device];
            known.handing_over = true;
            if let Some(place) = known.sender.send(content) {
                known.consuming.get_or_insert((Instant::now(), known.sender.loaded()));
                known.bytes += content as u64;
                known.pieces += 1;
                if known.begun.is_none() {
                    known.ahead_bytes = known.bytes;
                }
                state.piece_sent();
                return Ok(place);
            }
            state = self.wait(state);
        }
    }

    /// Records that a channel has queued the device's last piece.
    fn handed_over(&self, device: usize) {
        self.state().devices[device].handing_over = false;
    }

    /// Calls `describe` for each device, and returns the results.
    fn describe<T>(&self, describe: impl Fn(&DeviceId, DevicePhase, &DeviceState) -> T) -> Vec<T> {
        let state = self.state();
        let known = state.phases().zip(&state.devices);
        self.ids.iter().zip(known).map(|(id, (phase, known))| describe(id, phase, known)).collect()
    }

    pub(crate) fn progress(&self) -> Vec<DeviceProgress> {
        self.describe(|id, phase, known| DeviceProgress {
            device: id.to_string(),
            phase,
            bytes: known.bytes,
            arrived_bytes: known.arrived_bytes,
            remaining_bytes: known.remaining,
        })
    }

    pub(crate) fn report(&self) -> Vec<DeviceReport> {
        self.describe(|id, phase, known| DeviceReport {
            device: id.to_string(),
            phase,
            bytes: known.bytes,
            ahead_bytes: known.ahead_bytes,
            save_ms: between(known.begun, known.saved),
            transfer_ms: between(known.saved, known.arrived),
            load_ms: between(known.arrived, known.loaded),
            downtime_ms: between(known.begun, known.loaded),
        })
    }
}

/// A device that outlives the migrations in which it is saved, one after the other. The thread that saves it holds the lock.
pub(crate) type SharedDevice = Arc<Mutex<Box<dyn SaveDevice>>>;

/// Which channels pieces take.
#[derive(Clone)]
pub(crate) enum Route {
    /// The RAM channels.
    Mixed(Arc<Pipeline>),
    /// Channels of their own.
    Own(Arc<Vec<SendChannel>>),
    /// The stream channel.
    Serial(Arc<SendChannel>),
}

impl Route {
    /// Returns whether pieces count in the window, as pages do. Not on the stream channel, where records do not count either.
    fn enters_window(&self) -> bool {
        !matches!(self, Self::Serial(_))
    }

    fn channels(&self) -> &[SendChannel] {
        match self {
            Self::Mixed(pipeline) => &pipeline.channels,
            Self::Own(channels) => channels,
            Self::Serial(stream) => std::slice::from_ref(stream),
        }
    }
}

/// Where a device's pieces go.
pub(crate) struct PieceTarget {
    pub(crate) devices: Arc<SavingDevices>,
    pub(crate) route: Route,
    /// Bytes of content in a packet.
    pub(crate) packet_size: usize,
}

/// Starts a thread for each device and adds it to `threads`. The threads call `news`.
///
/// # Errors
/// A thread cannot be started. Those that were started end with [`SavingDevices::end`].
pub(crate) fn start(
    devices: Vec<SharedDevice>,
    threads: &mut Threads,
    target: impl Fn() -> PieceTarget,
    news: impl Fn(SaveEvent) + Clone + Send + 'static,
) -> io::Result<()> {
    for (number, device) in devices.into_iter().enumerate() {
        let id = target().devices.ids[number].clone();
        let mut saving = Saving {
            id: id.clone(),
            number,
            writer: PieceWriter {
                target: target(),
                number,
                largest: 0,
                // All buffers have one size, and the destination bounds how many are in use.
                buffers: Buffers::new(usize::MAX),
                piece: None,
                next: number,
            },
        };
        let news = news.clone();
        threads.start(format!("save-device-{number}"), id, move || {
            // Panics of the device are caught within the lock.
            saving.run(&mut **device.lock().unwrap_or_else(PoisonError::into_inner), &news);
        })?;
    }
    Ok(())
}

/// A device's thread.
struct Saving {
    id: DeviceId,
    number: usize,
    writer: PieceWriter,
}

impl Saving {
    fn run(&mut self, device: &mut dyn SaveDevice, news: &impl Fn(SaveEvent)) {
        if let Err(error) = unless_it_panics(|| self.serve(device, news)) {
            let text = format_args!("saving the state of device {} failed: {error}", self.id);
            news(SaveEvent::Failed(Reason::new(ErrorKind::Monitor, text)));
        }
        let ended = unless_it_panics(|| {
            device.saving_ended();
            Ok(())
        });
        if let Err(error) = ended {
            tracing::warn!(device = %self.id, %error, "the device failed when its saving had ended");
        }
    }

    fn serve(&mut self, device: &mut dyn SaveDevice, news: &impl Fn(SaveEvent)) -> Result<(), VmmError> {
        let number = self.number;
        // The estimate until something has been saved ahead.
        self.update_remaining(device, Ahead::Nothing);
        self.writer.begin()?;
        let serial = self.devices().state().turn.is_some();
        let mut ahead = if serial { Ahead::Nothing } else { device.save_ahead(&mut self.writer)? };
        self.writer.send_piece()?;
        self.update_remaining(device, ahead);
        if self.devices().state().devices[number].pieces == 0 {
            news(SaveEvent::NothingAhead(number as u16));
        } else {
            self.writer.mark(Piece::Ahead)?;
            self.devices().state().devices[number].first_sent = true;
        }
        loop {
            match self.devices().next_order(number) {
                None => return Ok(()),
                Some(Order::SaveMoreAhead) if ahead == Ahead::Later => {
                    ahead = device.save_ahead(&mut self.writer)?;
                    self.writer.send_piece()?;
                    self.update_remaining(device, ahead);
                }
                Some(Order::SaveMoreAhead) => {}
                Some(Order::Save) => break,
            }
        }
        self.devices().await_turn(number)?;
        self.devices().state().devices[number].begun = Some(Instant::now());
        device.save(&mut self.writer)?;
        self.writer.send_piece()?;
        self.writer.mark(Piece::End)?;
        let mut state = self.devices().state();
        let known = &mut state.devices[number];
        (known.saved, known.remaining) = (Some(Instant::now()), 0);
        known.note_arrival();
        if let Some(turn) = &mut state.turn {
            *turn += 1;
        }
        drop(state);
        self.devices().changed.notify_all();
        news(SaveEvent::Saved);
        Ok(())
    }

    fn devices(&self) -> &Arc<SavingDevices> {
        &self.writer.target.devices
    }

    fn update_remaining(&mut self, device: &mut dyn SaveDevice, ahead: Ahead) {
        let remaining = device.remaining();
        let mut state = self.devices().state();
        let known = &mut state.devices[self.number];
        (known.remaining, known.more_ahead) = (remaining, ahead == Ahead::Later);
    }
}

/// Cuts what a device writes into pieces and hands them to channels.
struct PieceWriter {
    target: PieceTarget,
    number: usize,
    /// Maximum bytes in a piece.
    largest: usize,
    buffers: Buffers,
    piece: Option<DeviceBytes>,
    /// The channel that is tried first.
    next: usize,
}

impl PieceWriter {
    fn begin(&mut self) -> Result<(), WindowClosed> {
        self.largest = self.target.devices.largest_piece(self.number, self.target.packet_size)?;
        Ok(())
    }

    /// Sends the bytes that were written and not sent.
    fn send_piece(&mut self) -> Result<(), WindowClosed> {
        match self.piece.take().filter(|piece| !piece.is_empty()) {
            None => Ok(()),
            Some(piece) => self.hand_over(piece.len(), Piece::Bytes(piece)),
        }
    }

    fn mark(&mut self, mark: Piece<DeviceBytes>) -> Result<(), WindowClosed> {
        self.hand_over(0, mark)
    }

    fn hand_over(&mut self, content: usize, piece: Piece<DeviceBytes>) -> Result<(), WindowClosed> {
        let place = self.target.devices.place(self.number, content)?;
        self.send_to_channel(place, content, piece)?;
        self.target.devices.handed_over(self.number);
        Ok(())
    }

    fn send_to_channel(&mut self, place: u64, content: usize, piece: Piece<DeviceBytes>) -> Result<(), WindowClosed> {
        let in_window = if self.target.route.enters_window() { content as u64 } else { 0 };
        let channels = self.target.route.channels();
        let mut item = Item::Device { device: self.number as u16, place, piece, in_window };
        // To the first channel with room; where none has any, waits for the next channel.
        for offset in 0..channels.len() {
            let channel = (self.next + offset) % channels.len();
            match channels[channel].try_send(item)? {
                None => {
                    self.next = channel + 1;
                    return Ok(());
                }
                Some(back) => item = back,
            }
        }
        let channel = self.next % channels.len();
        self.next = channel + 1;
        channels[channel].send(item)
    }
}

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = self.piece.get_or_insert_with(|| self.buffers.take(self.largest));
        let written = piece.fill(bytes, self.largest);
        if piece.len() == self.largest {
            self.send_piece().map_err(io::Error::other)?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::DevicePhase::{Loaded, Loading, LoadingAhead, OnTheWay, Ready, Saving, SavingAhead};
    use super::*;

    fn devices(count: u32, serial: bool) -> SavingDevices {
        let ids = (0..count).map(|instance| DeviceId::new("device", instance)).collect();
        SavingDevices::new(ids, serial, Duration::from_millis(300))
    }

    fn phases(devices: &SavingDevices) -> Vec<DevicePhase> {
        devices.progress().iter().map(|device| device.phase).collect()
    }

    #[test]
    fn the_phase_names_the_part_that_must_do_the_next_step() {
        let devices = devices(1, false);
        let phase = || phases(&devices)[0];
        let sends = || devices.place(0, 100).unwrap();
        assert_eq!(phase(), SavingAhead);
        devices.state().devices[0].handing_over = true;
        assert_eq!(phase(), LoadingAhead, "the destination has permitted nothing yet");
        devices.credit(0, 64 << 10).unwrap();
        devices.largest_piece(0, 4096).unwrap();
        assert_eq!(phase(), SavingAhead);
        sends();
        assert_eq!(phase(), OnTheWay, "no channel has queued it");
        devices.handed_over(0);
        assert_eq!(phase(), SavingAhead, "there is more to come");
        devices.state().devices[0].first_sent = true;
        assert_eq!(phase(), OnTheWay);
        devices.arrived(0, 100);
        assert_eq!(phase(), LoadingAhead);
        devices.loaded_ahead(0);
        assert_eq!(phase(), Ready);
        // Loading what followed will take longer than the guest may be paused.
        devices.state().devices[0].consume_rate = 100.0;
        assert_eq!(phase(), LoadingAhead);
        devices.state().devices[0].first_sent = false;
        assert_eq!(phase(), LoadingAhead, "also where nothing came at first");
        devices.save();
        assert_eq!(phase(), Saving);
        sends();
        assert_eq!(phase(), OnTheWay);
        devices.arrived(0, 100);
        assert_eq!(phase(), Loading, "its thread waits for permission to send more");
        devices.handed_over(0);
        assert_eq!(phase(), Saving);
        sends();
        devices.handed_over(0);
        devices.state().devices[0].saved = Some(Instant::now());
        assert_eq!(phase(), OnTheWay);
        devices.arrived(0, 100);
        assert_eq!(phase(), Loading);
        devices.loaded(0);
        assert_eq!(phase(), Loaded);
    }

    #[test]
    fn messages_about_a_device_after_the_end_do_not_hide_what_was_waited_for() {
        let devices = devices(1, false);
        devices.state().devices[0].first_sent = true;
        devices.end();
        devices.loaded_ahead(0);
        devices.loaded(0);
        assert_eq!(phases(&devices), [LoadingAhead]);
    }

    #[test]
    fn of_devices_that_go_one_after_the_other_those_that_come_later_are_not_waited_for() {
        let devices = devices(3, true);
        (0..3).for_each(|device| devices.loaded_ahead(device));
        devices.save();
        let saves = |device: usize| {
            let mut state = devices.state();
            state.devices[device].saved = Some(Instant::now());
            state.turn = Some(device + 1);
        };
        assert_eq!(phases(&devices), [Saving, Ready, Ready]);
        saves(0);
        assert_eq!(phases(&devices), [Loading, Saving, Ready]);
        saves(1);
        saves(2);
        assert_eq!(phases(&devices), [Loading, Ready, Ready]);
        devices.loaded(0);
        assert_eq!(phases(&devices), [Loaded, Loading, Ready]);
    }

    #[test]
    fn the_monitors_state_ahead_is_waited_for_like_a_devices() {
        let devices = devices(1, false);
        devices.loaded_ahead(0);
        assert!(!devices.all_loaded_ahead());
        assert_eq!(devices.waiting_for().unwrap(), "the monitor (loading ahead at the destination)");
        devices.monitor_loaded_ahead();
        assert!(devices.all_loaded_ahead());
        assert_eq!(devices.waiting_for(), None);
    }
}
