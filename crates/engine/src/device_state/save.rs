//! Devices at the source: a thread for each, and what it, the channels, the rounds and the driver know of it together.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterna_wire::device::{DeviceError, DeviceSender, Piece};

use super::buffer::{Buffers, DeviceBytes};
use super::{Ahead, DeviceId, DevicePhase, SaveDevice, Threads, unless_it_panics};
use crate::entry::Pipeline;
use crate::report::{DeviceProgress, DeviceReport, between};
use crate::send::{Item, SendChannel};
use crate::vmm::VmmError;
use crate::window::WindowClosed;

/// How fast state travels, or is taken, is not said by less than this, in bytes.
const MIN_BYTES: u64 = 1 << 20;
/// And by no shorter time: so much may come out of buffers at once.
const MIN_MEASURE: Duration = Duration::from_millis(20);

/// What a device's thread is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Look whether there is more to be saved ahead.
    Look,
    /// Save: the guest is paused.
    Save,
}

/// What a device's thread tells the driver.
#[derive(Debug)]
pub(crate) enum SaveNews {
    /// Nothing of this device was saved ahead: nobody need wait for its being loaded.
    NothingAhead(u16),
    /// All of the device's state is handed over.
    Saved,
    /// This has failed.
    Failed(String),
}

/// What is known of one device.
#[derive(Debug, Default)]
struct Known {
    sender: DeviceSender,
    order: Option<Order>,
    /// It may have more ahead.
    more_ahead: bool,
    remaining: u64,
    ahead_bytes: u64,
    bytes: u64,
    pieces: u64,
    arrived_bytes: u64,
    arrived_pieces: u64,
    /// Its thread waits with a piece for the destination's permission or for a channel, or is handing one over.
    handing_over: bool,
    /// All that was saved ahead at first is handed over.
    first_sent: bool,
    /// The destination has taken what was saved ahead.
    taken: bool,
    /// Since when there is anything that it has not taken, and what it had taken by then.
    taking: Option<(Instant, u64)>,
    /// Bytes per second that it was last seen to take; 0 before.
    take_rate: f64,
    begun: Option<Instant>,
    saved: Option<Instant>,
    arrived: Option<Instant>,
    loaded: Option<Instant>,
}

impl Known {
    /// How long what was sent will take to be taken, as far as that is known.
    fn loading(&self) -> Duration {
        let time = self.sender.untaken() as f64 / self.take_rate;
        if self.take_rate > 0.0 { Duration::from_secs_f64(time.min(1e9)) } else { Duration::ZERO }
    }

    fn look_what_was_taken(&mut self) {
        let Some((since, before)) = self.taking else { return };
        let (taken, elapsed) = (self.sender.taken() - before, since.elapsed());
        if taken >= MIN_BYTES && elapsed >= MIN_MEASURE {
            self.take_rate = taken as f64 / elapsed.as_secs_f64();
        }
        if self.sender.untaken() == 0 {
            self.taking = None;
        }
    }

    /// Where its state is; `stands`: the guest does, and the device is to save.
    fn phase(&self, stands: bool, downtime: Duration) -> DevicePhase {
        // What has arrived is the destination's, and what has not is nobody's.
        let sent = |there| if self.arrived_pieces == self.pieces { there } else { DevicePhase::OnTheWay };
        if self.loaded.is_some() {
            DevicePhase::Loaded
        } else if stands && (self.saved.is_some() || self.handing_over) {
            sent(DevicePhase::Loading)
        } else if stands {
            DevicePhase::Saving
        } else if self.taken && self.loading() <= downtime {
            DevicePhase::Ready
        } else if self.first_sent || self.taken || self.handing_over {
            sent(DevicePhase::LoadingAhead)
        } else {
            DevicePhase::SavingAhead
        }
    }

    fn look_whether_arrived(&mut self) {
        if self.saved.is_some() && self.arrived_pieces == self.pieces {
            self.arrived.get_or_insert_with(Instant::now);
        }
    }
}

#[derive(Debug)]
struct State {
    devices: Vec<Known>,
    /// Which device saves now, where one does after the other.
    turn: Option<usize>,
    /// The destination has loaded what the monitor has saved ahead, or that has saved nothing.
    monitor_taken: bool,
    /// The guest is paused, and all devices are to save.
    stands: bool,
    /// Of all devices, pieces that have been sent and have not arrived.
    on_the_way: u64,
    /// Since when there are any, and bytes of those that have arrived since.
    busy: Option<(Instant, u64)>,
    /// Bytes per second that were last seen to arrive; 0 before.
    rate: f64,
    over: bool,
}

impl State {
    /// Where each device's state is.
    fn phases(&self, downtime: Duration) -> impl Iterator<Item = DevicePhase> {
        // Where one device goes after the other: those before this one are loaded.
        let mut comes_next = true;
        self.devices.iter().enumerate().map(move |(number, known)| {
            let phase = known.phase(self.stands, downtime);
            let waits = self.turn.is_some_and(|turn| match phase {
                DevicePhase::Saving => number > turn,
                DevicePhase::Loading => !comes_next,
                _ => false,
            });
            comes_next &= phase == DevicePhase::Loaded;
            if waits { DevicePhase::Ready } else { phase }
        })
    }

    /// The device, if there is such a one and the destination says something of it before the end: what it says later is an echo of that.
    fn in_time(&mut self, device: u16) -> Option<&mut Known> {
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
        // From the beginning on: what comes at once after a delay says nothing without it.
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
pub struct SavingDevices {
    ids: Vec<DeviceId>,
    /// That is wanted.
    downtime: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl SavingDevices {
    pub(crate) fn new(ids: Vec<DeviceId>, serial: bool, downtime: Duration) -> Self {
        let devices = ids.iter().map(|_| Known::default()).collect();
        let turn = serial.then_some(0);
        let state = State {
            devices,
            turn,
            monitor_taken: false,
            stands: false,
            on_the_way: 0,
            busy: None,
            rate: 0.0,
            over: false,
        };
        Self { ids, downtime, state: Mutex::new(state), changed: Condvar::new() }
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

    /// The destination permits so much of a device's state in all.
    ///
    /// # Errors
    /// There is no such device, or nothing can be sent with so little.
    pub(crate) fn credit(&self, device: u16, up_to: u64) -> Result<(), String> {
        let mut state = self.state();
        let known = state.devices.get_mut(usize::from(device));
        let known =
            known.ok_or_else(|| format!("the destination speaks of a device {device}, which does not exist"))?;
        known.sender.credit(up_to).map_err(|error: DeviceError| error.to_string())?;
        known.look_what_was_taken();
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// A piece with so many bytes has arrived at the destination.
    pub(crate) fn arrived(&self, device: u16, bytes: u32) {
        let mut state = self.state();
        state.piece_arrived(bytes.into());
        let known = &mut state.devices[usize::from(device)];
        known.arrived_bytes += u64::from(bytes);
        known.arrived_pieces += 1;
        known.look_whether_arrived();
    }

    /// The destination's device has taken what was saved ahead, or nothing was.
    pub(crate) fn taken(&self, device: u16) {
        if let Some(known) = self.state().in_time(device) {
            known.taken = true;
        }
    }

    /// As [`SavingDevices::taken`], of what the monitor has saved ahead.
    pub(crate) fn monitor_taken(&self) {
        self.state().monitor_taken = true;
    }

    /// Whether everything that was saved ahead at first has been loaded.
    pub(crate) fn all_taken(&self) -> bool {
        let state = self.state();
        state.monitor_taken && state.devices.iter().all(|known| known.taken)
    }

    /// What is waited for of devices, and of the monitor before the guest is stopped, in words; none where it is something else.
    pub(crate) fn waiting_for(&self) -> Option<String> {
        let state = self.state();
        let monitor = (!state.monitor_taken).then_some((&"the monitor" as &dyn Display, DevicePhase::LoadingAhead));
        let devices = self.ids.iter().map(|id| id as &dyn Display).zip(state.phases(self.downtime));
        super::waiting_for(monitor.into_iter().chain(devices))
    }

    /// The destination's device has loaded all of its state.
    pub(crate) fn loaded(&self, device: u16) {
        if let Some(known) = self.state().in_time(device) {
            known.loaded.get_or_insert_with(Instant::now);
        }
    }

    /// Bytes of state that would have to be saved if the guest were stopped now.
    pub(crate) fn remaining(&self) -> u64 {
        // A device that cannot say how much it has may say that it is any number.
        self.state().devices.iter().fold(0, |sum, known| sum.saturating_add(known.remaining))
    }

    /// How long the destination's devices will take for what was sent to them already.
    pub(crate) fn loading(&self) -> Duration {
        self.state().devices.iter().map(Known::loading).max().unwrap_or_default()
    }

    /// How fast state has travelled so far, in bytes per second; 0 before enough of it has.
    pub(crate) fn rate(&self) -> f64 {
        self.state().rate
    }

    /// Has those devices looked at that may have more to be saved ahead.
    pub(crate) fn look(&self) {
        self.order(|known| (known.more_ahead && known.order.is_none()).then_some(Order::Look));
    }

    /// Has all devices saved: the guest is paused.
    pub(crate) fn save(&self) {
        self.state().stands = true;
        self.order(|_| Some(Order::Save));
    }

    fn order(&self, order: impl Fn(&Known) -> Option<Order>) {
        let mut state = self.state();
        for known in &mut state.devices {
            known.order = order(known).or(known.order);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether all devices have been saved, and when the last one was.
    pub(crate) fn all_saved(&self) -> Option<Option<Instant>> {
        let state = self.state();
        let saved: Option<Vec<Instant>> = state.devices.iter().map(|known| known.saved).collect();
        saved.map(|saved| saved.into_iter().max())
    }

    /// The migration has ended or is being taken down: nobody is to wait here.
    pub(crate) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// The next order; none at the end.
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

    /// Bytes that a piece may have; waits until the destination has said.
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

    /// The place of the next piece; waits until the destination has room for it.
    fn place(&self, device: usize, content: usize) -> Result<u64, WindowClosed> {
        let mut state = self.state();
        loop {
            if state.over {
                return Err(WindowClosed);
            }
            let known = &mut state.devices[device];
            known.handing_over = true;
            if let Some(place) = known.sender.send(content) {
                known.taking.get_or_insert((Instant::now(), known.sender.taken()));
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

    /// A channel has taken the piece that was given its place last.
    fn handed_over(&self, device: usize) {
        self.state().devices[device].handing_over = false;
    }

    /// Each device with what is known of it.
    fn told<T>(&self, tell: impl Fn(&DeviceId, DevicePhase, &Known) -> T) -> Vec<T> {
        let state = self.state();
        let known = state.phases(self.downtime).zip(&state.devices);
        self.ids.iter().zip(known).map(|(id, (phase, known))| tell(id, phase, known)).collect()
    }

    pub(crate) fn progress(&self) -> Vec<DeviceProgress> {
        self.told(|id, phase, known| DeviceProgress {
            device: id.to_string(),
            phase,
            bytes: known.bytes,
            arrived_bytes: known.arrived_bytes,
            remaining_bytes: known.remaining,
        })
    }

    pub(crate) fn report(&self) -> Vec<DeviceReport> {
        self.told(|id, phase, known| DeviceReport {
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

/// Which channels pieces take.
#[derive(Clone)]
pub(crate) enum Route {
    /// Those of RAM.
    Mixed(Arc<Pipeline>),
    /// Channels of their own.
    Own(Arc<Vec<SendChannel>>),
    /// The stream channel.
    Serial(Arc<SendChannel>),
}

impl Route {
    /// Whether what is on its way counts with pages. Not on the stream channel: the destination reads none of it between the first of the
    /// monitor's state and the last page.
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
pub(crate) struct Way {
    pub(crate) devices: Arc<SavingDevices>,
    pub(crate) route: Route,
    /// Bytes of content in a packet.
    pub(crate) packet_size: usize,
}

/// Starts a thread for each device, among `threads`; `news` is called by them.
///
/// # Errors
/// The system has no thread. Those that were started end with [`SavingDevices::end`].
pub(crate) fn start(
    devices: Vec<Box<dyn SaveDevice>>,
    threads: &mut Threads,
    way: impl Fn() -> Way,
    news: impl Fn(SaveNews) + Clone + Send + 'static,
) -> io::Result<()> {
    for (number, device) in devices.into_iter().enumerate() {
        let id = way().devices.ids[number].clone();
        let saving = Saving {
            id: id.clone(),
            number,
            writer: PieceWriter {
                way: way(),
                number,
                largest: 0,
                // All are of one size, and no more of them in use than the destination permits.
                buffers: Buffers::new(usize::MAX),
                piece: None,
                next: number,
            },
            device,
        };
        let news = news.clone();
        threads.start(format!("save-device-{number}"), id, move || saving.run(&news))?;
    }
    Ok(())
}

/// A device's thread.
struct Saving {
    id: DeviceId,
    number: usize,
    writer: PieceWriter,
    device: Box<dyn SaveDevice>,
}

impl Saving {
    fn run(mut self, news: &impl Fn(SaveNews)) {
        if let Err(error) = unless_it_panics(|| self.serve(news)) {
            news(SaveNews::Failed(format!("saving the state of device {} failed: {error}", self.id)));
        }
    }

    fn serve(&mut self, news: &impl Fn(SaveNews)) -> Result<(), VmmError> {
        let number = self.number;
        // Until something has been saved ahead.
        self.look_at_remaining(Ahead::Nothing);
        self.writer.begin()?;
        let serial = self.devices().state().turn.is_some();
        let mut ahead = if serial { Ahead::Nothing } else { self.device.save_ahead(&mut self.writer)? };
        self.writer.send_piece()?;
        self.look_at_remaining(ahead);
        if self.devices().state().devices[number].pieces == 0 {
            news(SaveNews::NothingAhead(number as u16));
        } else {
            self.writer.mark(Piece::Ahead)?;
            self.devices().state().devices[number].first_sent = true;
        }
        loop {
            match self.devices().next_order(number) {
                None => return Ok(()),
                Some(Order::Look) if ahead == Ahead::Later => {
                    ahead = self.device.save_ahead(&mut self.writer)?;
                    self.writer.send_piece()?;
                    self.look_at_remaining(ahead);
                }
                Some(Order::Look) => {}
                Some(Order::Save) => break,
            }
        }
        self.devices().await_turn(number)?;
        self.devices().state().devices[number].begun = Some(Instant::now());
        self.device.save(&mut self.writer)?;
        self.writer.send_piece()?;
        self.writer.mark(Piece::End)?;
        let mut state = self.devices().state();
        let known = &mut state.devices[number];
        (known.saved, known.remaining) = (Some(Instant::now()), 0);
        known.look_whether_arrived();
        if let Some(turn) = &mut state.turn {
            *turn += 1;
        }
        drop(state);
        self.devices().changed.notify_all();
        news(SaveNews::Saved);
        Ok(())
    }

    fn devices(&self) -> &Arc<SavingDevices> {
        &self.writer.way.devices
    }

    fn look_at_remaining(&mut self, ahead: Ahead) {
        let remaining = self.device.remaining();
        let mut state = self.devices().state();
        let known = &mut state.devices[self.number];
        (known.remaining, known.more_ahead) = (remaining, ahead == Ahead::Later);
    }
}

/// Cuts what a device writes into pieces and hands them to channels.
struct PieceWriter {
    way: Way,
    number: usize,
    /// Bytes in a piece, at most.
    largest: usize,
    buffers: Buffers,
    piece: Option<DeviceBytes>,
    /// The channel that is tried first.
    next: usize,
}

impl PieceWriter {
    fn begin(&mut self) -> Result<(), WindowClosed> {
        self.largest = self.way.devices.largest_piece(self.number, self.way.packet_size)?;
        Ok(())
    }

    /// Sends what was written and not sent.
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
        let place = self.way.devices.place(self.number, content)?;
        self.give_to_channel(place, content, piece)?;
        self.way.devices.handed_over(self.number);
        Ok(())
    }

    fn give_to_channel(&mut self, place: u64, content: usize, piece: Piece<DeviceBytes>) -> Result<(), WindowClosed> {
        let in_window = if self.way.route.enters_window() { content as u64 } else { 0 };
        let channels = self.way.route.channels();
        let mut item = Item::Device { device: self.number as u16, place, piece, in_window };
        // To one that has room for it; where none has, it is waited for at the next.
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
        let taken = piece.fill(bytes, self.largest);
        if piece.len() == self.largest {
            self.send_piece().map_err(io::Error::other)?;
        }
        Ok(taken)
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
    fn who_is_waited_for_is_the_one_who_has_to_do_the_next_thing() {
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
        assert_eq!(phase(), OnTheWay, "no channel has taken it");
        devices.handed_over(0);
        assert_eq!(phase(), SavingAhead, "there is more to come");
        devices.state().devices[0].first_sent = true;
        assert_eq!(phase(), OnTheWay);
        devices.arrived(0, 100);
        assert_eq!(phase(), LoadingAhead);
        devices.taken(0);
        assert_eq!(phase(), Ready);
        // What followed will take longer to be loaded than the guest may stand.
        devices.state().devices[0].take_rate = 100.0;
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
    fn what_is_said_of_a_device_after_the_end_does_not_hide_what_was_waited_for() {
        let devices = devices(1, false);
        devices.state().devices[0].first_sent = true;
        devices.end();
        devices.taken(0);
        devices.loaded(0);
        assert_eq!(phases(&devices), [LoadingAhead]);
    }

    #[test]
    fn of_devices_that_go_one_after_the_other_those_that_come_later_are_not_waited_for() {
        let devices = devices(3, true);
        (0..3).for_each(|device| devices.taken(device));
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
    fn what_the_monitor_has_saved_ahead_is_waited_for_like_a_device() {
        let devices = devices(1, false);
        devices.taken(0);
        assert!(!devices.all_taken());
        assert_eq!(devices.waiting_for().unwrap(), "the monitor (loading ahead at the destination)");
        devices.monitor_taken();
        assert!(devices.all_taken());
        assert_eq!(devices.waiting_for(), None);
    }
}
