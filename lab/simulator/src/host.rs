//! The host and the threads of migrations on it.
//!
//! A thread has a core while it works, a step at a time, and decides its next step when one is done; it releases the
//! core when it must wait. A completion wakes no thread, because it is only a record in memory: a thread of Sterna's
//! structure sleeps until the completion is expected and then polls; in the published structure one thread polls all the time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Grant, Predictor, Share};

use crate::Nanos;
use crate::costs::{Cpu, after};
use crate::device::{Completed, Device};
use crate::ledger::Sheet;
use crate::resources::{Cores, Pipe};
use crate::scenario::{Policy, Scenario, Structure};

mod outcome;
mod sender;

pub use outcome::{Outcome, VmOutcome, WINDOW};

/// A packet of pages.
#[derive(Clone, Copy, Debug)]
struct Packet {
    pages: u32,
    normal: u32,
}

impl Packet {
    fn bytes(self) -> u64 {
        u64::from(self.pages) << 12
    }
}

/// A batch in a device, as its sender sees it.
#[derive(Debug)]
struct InFlight {
    tag: u64,
    packet: Packet,
    device: usize,
    grant: Grant,
    predicted: Nanos,
    submitted: Nanos,
    /// How long it had waited for admission.
    admission: Nanos,
    /// When a poll last found it pending.
    pending: Nanos,
    visible: Option<Nanos>,
}

/// A batch that was admitted.
#[derive(Debug)]
struct Admitted {
    packet: Packet,
    device: usize,
    grant: Grant,
    predicted: Nanos,
    admission: Nanos,
}

/// A batch that was meant for a device and is done by the CPU.
#[derive(Clone, Copy, Debug)]
struct Diverted {
    begun: Nanos,
    /// How long it had waited for admission.
    admission: Nanos,
    /// The device whose share decided that the CPU is faster, if that is the reason.
    spilled: Option<usize>,
}

/// The event after a step.
#[derive(Debug)]
enum Then {
    Nothing,
    Found(Packet),
    Submit(Admitted),
    Checked { packet: Packet, diverted: Option<Diverted> },
    Sent(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Working,
    Runnable,
    Blocked,
    Ended,
}

#[derive(Debug)]
struct Thread {
    vm: usize,
    /// None for the thread that searches.
    channel: Option<usize>,
    state: State,
    then: Then,
    /// Identifies the current sleep: a wake-up set for an earlier sleep is ignored.
    sleep: u64,
    runnable_since: Nanos,
    slice: f64,
    /// Time on a core and time waiting for one, both fading: the CPU's real cost in wall-clock time.
    ran: f64,
    waited: f64,
    faded: Nanos,
    owes: Cpu,
}

#[derive(Debug, Default)]
struct Sender {
    in_flight: Vec<InFlight>,
    checked: VecDeque<Packet>,
    /// The time until which the share makes it wait.
    not_before: Nanos,
    next_device: usize,
    /// Bytes that the socket holds: when they will have left, and how many.
    socket: VecDeque<(Nanos, f64)>,
    held: f64,
    /// The current send call returns at this time.
    blocked_until: Nanos,
}

#[derive(Debug)]
struct Migration {
    left: u64,
    normal: u64,
    packets: VecDeque<Packet>,
    most_packets: usize,
    searching: bool,
    ended: usize,
    /// For the polling thread: the batches that it waits for, in order, and since when.
    polled: VecDeque<(u64, usize, Option<Nanos>)>,
    polls_since: Nanos,
    polled_until: Nanos,
    /// How long its next batch has waited for admission, and the last refused request: since when, until when. The
    /// channel does not matter: all channels take from the same packets.
    waited: Nanos,
    asked: Option<(Nanos, Nanos)>,
    gone: bool,
}

/// One process's view of one device.
#[derive(Debug)]
struct View {
    predictor: Predictor,
    sojourn: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Begin(usize),
    Die(usize),
    Hog(usize),
    Device(usize),
    Stepped(usize),
    Woken(usize, u64),
}

/// The first tag of a hog, larger than any sender's.
const HOGS: u64 = 1 << 48;

struct World<'a> {
    scenario: &'a Scenario,
    now: Nanos,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    serial: u64,
    next_tag: u64,
    cores: Cores,
    devices: Vec<Device>,
    device_event: Vec<Option<Nanos>>,
    memory: Pipe,
    network: Pipe,
    threads: Vec<Thread>,
    senders: Vec<Sender>,
    migrations: Vec<Migration>,
    shares: Vec<Vec<Box<dyn Share>>>,
    views: Vec<Vec<View>>,
    sheets: Vec<Sheet>,
    /// The owner of each tag: the sender's thread.
    owners: std::collections::HashMap<u64, usize>,
    outcome: Outcome,
    completed: Vec<Completed>,
}

/// Runs the scenario to its end.
///
/// # Panics
/// If a VM has no channel, or a batch no pages.
pub fn run(scenario: &Scenario) -> Outcome {
    let mut world = World::new(scenario);
    for (index, vm) in scenario.vms.iter().enumerate() {
        assert!(
            vm.channels > 0 && vm.batch > 0 && vm.window > 0,
            "a migration needs a channel, a batch size and a window"
        );
        world.at(vm.begins, Event::Begin(index));
        if let Some(moment) = vm.dies {
            world.at(moment, Event::Die(index));
        }
    }
    for (index, hog) in scenario.hogs.iter().enumerate() {
        world.at(hog.begins, Event::Hog(index));
    }
    let mut open = scenario.vms.len();
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        if at > scenario.limit {
            break;
        }
        world.now = at;
        match event {
            Event::Begin(vm) => world.begin(vm),
            Event::Die(vm) => {
                if !world.migrations[vm].gone && world.outcome.vms[vm].finished.is_none() {
                    world.die(vm);
                    open -= 1;
                }
            }
            Event::Hog(hog) => world.hog(hog),
            Event::Device(device) => world.device(device),
            Event::Stepped(thread) => world.stepped(thread),
            Event::Woken(thread, sleep) => {
                if world.threads[thread].sleep == sleep {
                    world.wake(thread);
                }
            }
        }
        open -= std::mem::take(&mut world.outcome.just_finished);
        if open == 0 {
            break;
        }
    }
    world.finish()
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let sheets: Vec<Sheet> = (0..scenario.devices).map(|_| Sheet::default()).collect();
        let mut shares: Vec<Vec<Box<dyn Share>>> = Vec::new();
        for vm in &scenario.vms {
            let of_process = |sheet: &Sheet| -> Box<dyn Share> {
                if vm.lies {
                    // It holds an empty slot.
                    let _ = sheet.slot(true);
                    return Policy::Fifo.share(false, sheet);
                }
                scenario.policy.share(scenario.spill, sheet)
            };
            // All VMs of one process use the same shares.
            if scenario.policy != Policy::Exact || shares.is_empty() || vm.lies {
                shares.push(sheets.iter().map(of_process).collect());
            } else {
                shares.push(Vec::new());
            }
        }
        let fresh = || View { predictor: Predictor::default(), sojourn: 0.0 };
        Self {
            scenario,
            now: 0,
            events: BinaryHeap::new(),
            serial: 0,
            next_tag: 0,
            cores: Cores::new(scenario.cores),
            devices: (0..scenario.devices).map(|_| Device::new(&scenario.device)).collect(),
            device_event: vec![None; scenario.devices],
            memory: Pipe::new(scenario.costs.dram),
            network: Pipe::new(scenario.costs.link),
            threads: Vec::new(),
            senders: Vec::new(),
            migrations: scenario
                .vms
                .iter()
                .map(|vm| Migration {
                    left: vm.pages,
                    normal: 0,
                    packets: VecDeque::new(),
                    most_packets: if scenario.structure == Structure::Harvest { 2 * vm.channels } else { 1 },
                    searching: true,
                    ended: 0,
                    polled: VecDeque::new(),
                    polls_since: 0,
                    polled_until: 0,
                    waited: 0,
                    asked: None,
                    gone: false,
                })
                .collect(),
            views: shares.iter().map(|_| (0..scenario.devices).map(|_| fresh()).collect()).collect(),
            shares,
            sheets,
            owners: std::collections::HashMap::new(),
            outcome: Outcome::new(scenario),
            completed: Vec::new(),
        }
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((at.max(self.now), self.serial, event)));
    }

    /// Returns the index of the shares that decide for a VM.
    fn process(&self, vm: usize) -> usize {
        if self.shares[vm].is_empty() { 0 } else { vm }
    }

    fn begin(&mut self, vm: usize) {
        for channel in std::iter::once(None).chain((0..self.scenario.vms[vm].channels).map(Some)) {
            let thread = self.threads.len();
            self.threads.push(Thread {
                vm,
                channel: channel.map(|_| self.senders.len()),
                state: State::Blocked,
                then: Then::Nothing,
                sleep: 0,
                runnable_since: self.now,
                slice: 0.0,
                ran: 1.0,
                waited: 0.0,
                faded: self.now,
                owes: Cpu::default(),
            });
            if channel.is_some() {
                self.senders.push(Sender { next_device: vm, ..Sender::default() });
            }
            self.wake(thread);
        }
    }

    fn die(&mut self, vm: usize) {
        self.migrations[vm].gone = true;
        for device in 0..self.devices.len() {
            // With a ledger, every VM is a process and holds the slot of its number.
            self.sheets[device].kill(vm);
        }
        for index in 0..self.threads.len() {
            if self.threads[index].vm == vm {
                // A thread on a core releases it at the end of the step.
                if self.threads[index].state == State::Blocked {
                    self.threads[index].state = State::Ended;
                }
                self.threads[index].sleep += 1;
            }
        }
        self.outcome.vms[vm].died = true;
    }

    fn hog(&mut self, hog: usize) {
        let it = self.scenario.hogs[hog];
        for _ in 0..it.batches {
            self.hog_submits(hog);
        }
        self.schedule(it.device);
    }

    fn hog_submits(&mut self, hog: usize) {
        let it = self.scenario.hogs[hog];
        if it.device < self.devices.len() {
            let _ = self.devices[it.device].submit(HOGS + hog as u64, 1, it.bytes, self.now);
        }
    }

    /// Makes a blocked thread runnable.
    fn wake(&mut self, thread: usize) {
        if self.threads[thread].state != State::Blocked {
            return;
        }
        self.threads[thread].sleep += 1;
        self.threads[thread].owes += Cpu::charged(self.scenario.costs.wake);
        self.threads[thread].slice = 0.0;
        self.runnable(thread);
    }

    fn runnable(&mut self, thread: usize) {
        self.threads[thread].state = State::Runnable;
        self.threads[thread].runnable_since = self.now;
        if self.cores.want(thread) {
            self.dispatch(thread);
        }
    }

    /// Gives a core to a thread.
    fn dispatch(&mut self, thread: usize) {
        let it = &mut self.threads[thread];
        it.state = State::Working;
        // Over the last milliseconds.
        let fade = (-((self.now - it.faded) as f64) / 5e6).exp2();
        it.faded = self.now;
        it.ran = it.ran * fade + 1.0;
        it.waited = it.waited * fade + (self.now - it.runnable_since) as f64;
        self.decide(thread);
    }

    fn release(&mut self) {
        if let Some(next) = self.cores.give() {
            self.dispatch(next);
        }
    }

    /// Begins a step of this much CPU and memory traffic; the thread has a core.
    fn work(&mut self, thread: usize, cpu: Cpu, traffic: f64, then: Then) {
        let it = &mut self.threads[thread];
        let cpu = cpu.and(std::mem::take(&mut it.owes));
        let mut end = after(self.now, cpu.total());
        if traffic > 0.0 {
            end = end.max(self.memory.reserve(self.now, traffic));
        }
        // A core that waits for memory is busy; the excess belongs to the same account.
        let cpu = cpu.times((end - self.now) as f64 / cpu.total().max(1.0));
        it.then = then;
        it.ran += (end - self.now) as f64;
        it.slice += (end - self.now) as f64;
        let vm = &mut self.outcome.vms[it.vm];
        match (&it.then, it.channel) {
            (_, None) => vm.search += cpu,
            (Then::Sent(_), _) => vm.send += cpu,
            _ => vm.check += cpu,
        }
        self.at(end, Event::Stepped(thread));
    }

    fn block(&mut self, thread: usize, until: Option<Nanos>) {
        self.threads[thread].state = State::Blocked;
        self.threads[thread].sleep += 1;
        if let Some(until) = until {
            let until = after(until.max(self.now), self.scenario.costs.timer_slack);
            let sleep = self.threads[thread].sleep;
            self.at(until, Event::Woken(thread, sleep));
        }
        self.release();
    }

    fn end(&mut self, thread: usize) {
        self.threads[thread].state = State::Ended;
        self.threads[thread].sleep += 1;
        self.release();
    }

    /// Handles the end of a step.
    fn stepped(&mut self, thread: usize) {
        let vm = self.threads[thread].vm;
        if self.migrations[vm].gone {
            self.end(thread);
            return;
        }
        match std::mem::replace(&mut self.threads[thread].then, Then::Nothing) {
            Then::Nothing => {}
            Then::Found(packet) => {
                self.migrations[vm].packets.push_back(packet);
                self.wake_sender(vm);
            }
            Then::Submit(admitted) => {
                if !self.submit_admitted(thread, admitted) {
                    return;
                }
            }
            Then::Checked { packet, diverted } => self.checked(thread, packet, diverted),
            Then::Sent(bytes) => self.sent(thread, bytes),
        }
        let it = &mut self.threads[thread];
        if it.state != State::Working {
            return;
        }
        if it.slice >= self.scenario.costs.time_slice && self.cores.wanted() {
            it.slice = 0.0;
            self.runnable(thread);
            self.release();
            return;
        }
        self.decide(thread);
    }

    /// Wakes one idle sender for a packet.
    fn wake_sender(&mut self, vm: usize) {
        let blocked = |thread: &Thread| thread.vm == vm && thread.channel.is_some() && thread.state == State::Blocked;
        let now = self.now;
        let idle = self.threads.iter().position(|thread| {
            blocked(thread) && {
                let sender = &self.senders[thread.channel.expect("a sender")];
                sender.checked.is_empty()
                    && sender.blocked_until <= now
                    && sender.in_flight.len() < self.scenario.vms[vm].window
                    && sender.not_before <= now
            }
        });
        if let Some(thread) = idle {
            self.wake(thread);
        }
    }

    fn wake_search(&mut self, vm: usize) {
        // The first thread of a migration.
        if let Some(thread) = self.threads.iter().position(|thread| thread.vm == vm && thread.channel.is_none()) {
            self.wake(thread);
        }
    }

    fn decide(&mut self, thread: usize) {
        let vm = self.threads[thread].vm;
        if self.migrations[vm].gone {
            self.end(thread);
            return;
        }
        match self.threads[thread].channel {
            None => self.search(thread, vm),
            Some(channel) => self.sender(thread, vm, channel),
        }
    }

    fn search(&mut self, thread: usize, vm: usize) {
        let spec = self.scenario.vms[vm];
        let migration = &mut self.migrations[vm];
        if migration.left == 0 {
            if migration.packets.is_empty() {
                migration.searching = false;
                self.end(thread);
                let senders: Vec<usize> = (0..self.threads.len())
                    .filter(|&other| self.threads[other].vm == vm && self.threads[other].channel.is_some())
                    .collect();
                for sender in senders {
                    self.wake(sender);
                }
                return;
            }
            self.block(thread, None);
            return;
        }
        if migration.packets.len() >= migration.most_packets {
            self.block(thread, None);
            return;
        }
        let pages = migration.left.min(u64::from(spec.batch));
        migration.left -= pages;
        // Spread evenly over the packets.
        migration.normal += pages * spec.normal_per_mille;
        let normal = migration.normal / 1000;
        migration.normal %= 1000;
        let packet = Packet { pages: pages as u32, normal: normal as u32 };
        let cpu = Cpu::measured(self.scenario.costs.search_page).times(pages as f64);
        self.work(thread, cpu, 0.0, Then::Found(packet));
    }

    fn schedule(&mut self, device: usize) {
        if let Some(next) = self.devices[device].next()
            && self.device_event[device].is_none_or(|set| next < set || set < self.now)
        {
            self.device_event[device] = Some(next);
            self.at(next, Event::Device(device));
        }
    }

    fn device(&mut self, device: usize) {
        self.device_event[device] = None;
        let mut completed = std::mem::take(&mut self.completed);
        self.devices[device].advance(self.now, &mut completed);
        for done in completed.drain(..) {
            if done.tag >= HOGS {
                let hog = (done.tag - HOGS) as usize;
                self.outcome.hog_device += Device::service(&self.scenario.device.timing, self.scenario.hogs[hog].bytes);
                self.hog_submits(hog);
                continue;
            }
            let Some(thread) = self.owners.remove(&done.tag) else { continue };
            let vm = self.threads[thread].vm;
            let channel = self.threads[thread].channel.expect("only senders submit");
            if let Some(batch) = self.senders[channel].in_flight.iter_mut().find(|batch| batch.tag == done.tag) {
                // The device uses memory bandwidth too.
                let visible = done.at.max(self.memory.reserve(self.now, batch.packet.bytes() as f64));
                batch.visible = Some(visible);
                let sojourn = visible - batch.submitted;
                let admission = batch.admission;
                let busy = Device::service(&self.scenario.device.timing, batch.packet.bytes());
                self.outcome.device_time(vm, self.now, busy);
                self.outcome.vms[vm].waited(admission, sojourn);
                self.polled(vm, done.tag, visible);
            }
        }
        self.completed = completed;
        self.schedule(device);
    }

    /// Handles a completion in the published structure, whose polling thread sees completions in the order of
    /// submission.
    fn polled(&mut self, vm: usize, tag: u64, visible: Nanos) {
        if self.scenario.structure != Structure::CompletionThread {
            return;
        }
        let migration = &mut self.migrations[vm];
        if let Some(entry) = migration.polled.iter_mut().find(|(other, ..)| *other == tag) {
            entry.2 = Some(visible);
        }
        let mut woken = Vec::new();
        while let Some(&(_, thread, Some(visible))) = migration.polled.front() {
            migration.polled.pop_front();
            migration.polled_until = migration.polled_until.max(after(visible, self.scenario.costs.poll));
            woken.push((thread, migration.polled_until));
        }
        if migration.polled.is_empty() && !woken.is_empty() {
            let polling = migration.polled_until.saturating_sub(migration.polls_since) as f64;
            migration.polls_since = migration.polled_until;
            // The polling thread sleeps while nothing is in flight.
            self.outcome.vms[vm].poll += Cpu::charged(polling + self.scenario.costs.wake);
        }
        for (thread, seen) in woken {
            let sleep = self.threads[thread].sleep;
            self.at(seen, Event::Woken(thread, sleep));
        }
    }

    fn finish(mut self) -> Outcome {
        let drained = self.outcome.vms.iter().filter_map(|vm| vm.finished).max();
        self.outcome.ended = drained.unwrap_or(0).max(self.now);
        self.outcome.memory_busy = self.memory.busy();
        self.outcome.network_busy = self.network.busy();
        self.outcome.device_busy = self.devices.iter().map(Device::busy).collect();
        self.outcome.refused = self.devices.iter().map(|device| device.refused).sum();
        self.outcome
    }

    fn ask(&mut self, vm: usize, channel: usize, device: usize, packet: Packet) -> (AdmissionDecision, Nanos) {
        let process = self.process(vm);
        let predicted = self.views[process][device].predictor.predict(packet.bytes(), packet.pages);
        let weight = self.scenario.vms[vm].weight;
        let ask = AdmissionRequest { vm: vm as u32, channel: channel as u32, weight, predicted, bytes: packet.bytes() };
        (self.shares[process][device].ask(&ask, self.now), predicted)
    }
}
