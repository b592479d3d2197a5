//! A source whose destination sends heartbeats and takes pages, but does not read its control channel: time limits and cancellation act
//! all the same, and the guest runs on.

use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use socket2::SockRef;
use sterna_codec::MethodChoice;
use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::send_message;
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::report::{Observer, Progress};
use sterna_engine::session::{ChannelAcceptor, Handshake};
use sterna_engine::source::{NotConverging, Source, TimeLimits};
use sterna_engine::transport::{Address, Limits, Listener, Security};
use sterna_wire::control::{ControlMessage, Mode};
use sterna_wire::limits::HEARTBEAT_INTERVAL;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload, log_of};
use crate::odd_destinations::{BUSY, FEATURES, Nowhere, PAGES, SHAPES};

/// Takes a source's pages and sends it heartbeats until `ended`. Reads nothing that the source sends on the control channel.
fn deaf_destination(listener: Listener, ended: &Receiver<()>) {
    let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
    let greeting = Handshake { takes: &[(Mode::Embedded, FEATURES)], refusals: &|_| Vec::new(), describe: None };
    let mut greeted = greeting.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
    let abort = Arc::new(Abort::default());
    let sinks = Box::new(Nowhere(SHAPES.into(), Arc::default()));
    let acceptor = ChannelAcceptor::new(greeted.session, sinks, &abort, None, Arc::new(drop));
    acceptor.open();
    let stop = incoming.stop_handle();
    std::thread::scope(|scope| {
        let acceptor = &acceptor;
        scope.spawn(move || {
            while let Some((connection, header)) = incoming.next() {
                acceptor.admit(connection, &header);
            }
        });
        let mut message = ControlMessage::Welcome(greeted.welcome);
        loop {
            // Fails where the source has closed the connection.
            let _ = send_message(&mut greeted.writer, &message);
            message = ControlMessage::Heartbeat;
            if ended.recv_timeout(HEARTBEAT_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
        stop.stop();
    });
    abort.finish();
    acceptor.join();
}

/// The source's end of the control channel.
#[derive(Clone, Default)]
struct Control(Arc<Mutex<Option<TcpStream>>>);

impl Control {
    /// Returns the address of a destination, by connections of which the first is the control channel.
    fn connecting(&self, to: &Address) -> Address {
        let Address::Tcp(to) = to.clone() else { panic!("{to}") };
        let first = Arc::clone(&self.0);
        Address::connecting(to.clone(), move || {
            let socket = TcpStream::connect(&to)?;
            first.lock().unwrap().get_or_insert_with(|| socket.try_clone().unwrap());
            Ok(socket.into())
        })
    }

    /// Fills all buffers on the way to the destination, as messages do in time. A peer that reads a byte now and then keeps TCP from giving
    /// up, which the missing time limit stands for.
    fn fill(&self) {
        let socket = self.0.lock().unwrap();
        let socket = socket.as_ref().expect("the source is connected");
        SockRef::from(socket).set_tcp_user_timeout(None).unwrap();
        loop {
            match send(socket, &[0; 4096], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => {}
                Err(error) => return assert_eq!(error, Errno::AGAIN),
            }
        }
    }
}

/// Has the buffers filled at some moment, and then perhaps cancels.
struct Filling {
    control: Control,
    when: When,
    cancel: Cancel,
    reports: Mutex<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// In the rounds. The migration is cancelled when the next progress shows that the source goes on.
    Rounds,
    /// Right before the guest is paused.
    Pausing,
}

impl Observer for Filling {
    fn progress(&self, progress: &Progress) {
        if self.when != When::Rounds || progress.phase != Phase::Rounds {
            return;
        }
        let mut reports = self.reports.lock().unwrap();
        *reports += 1;
        match *reports {
            1 => self.control.fill(),
            2 => self.cancel.cancel(),
            _ => {}
        }
    }

    fn note(&self, text: &str) {
        if self.when == When::Pausing && text == "stopping the guest" {
            self.control.fill();
        }
    }
}

/// Moves a guest with this workload to a deaf destination. Returns the error, and whether the guest runs.
fn to_the_deaf(when: When, workload: Workload, downtime: Duration) -> (MigrationError, bool) {
    let memory = Memory::new(PAGES[0], PAGES[1]);
    memory.fill();
    let (mut from, log) = Monitor::new(&memory, &Running::default(), workload);
    let log = log_of(&from, log);
    from.start();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let control = Control::default();
    let address = control.connecting(&listener.local_address());
    let short = Duration::from_millis(100);
    let mut migration = Source::new(memory.ram(), log)
        .method(MethodChoice::default())
        .when_not_converging(NotConverging::GoOn)
        .time_limits(TimeLimits::default().step(short).reporting_abort(short))
        .bandwidth(Some(20 << 20))
        .downtime(downtime);
    let cancel = Cancel::new();
    let observer = Filling { control, when, cancel: cancel.clone(), reports: Mutex::default() };
    let (end, ended) = channel();
    let sent = std::thread::scope(|scope| {
        scope.spawn(move || deaf_destination(listener, &ended));
        let sent = migration.run(address, &Security::Insecure, &mut from, &cancel, &observer);
        drop(end);
        sent
    });
    let runs = from.runs();
    from.stop();
    (sent.unwrap_err(), runs)
}

#[test]
fn a_migration_to_a_destination_that_does_not_read_can_be_cancelled() {
    within_a_minute(|| {
        let (error, runs) = to_the_deaf(When::Rounds, BUSY, Duration::from_millis(1));
        assert_eq!((error.kind, error.guest), (ErrorKind::Cancelled, GuestState::RunsAtSource), "{error}");
        assert!(runs);
    });
}

#[test]
fn a_guest_that_is_paused_for_a_destination_that_does_not_read_is_resumed_at_the_time_limit() {
    within_a_minute(|| {
        let idle = Workload { span: 1, ..BUSY };
        let (error, runs) = to_the_deaf(When::Pausing, idle, Duration::from_millis(10));
        assert_eq!((error.kind, error.guest), (ErrorKind::TimeLimit, GuestState::RunsAtSource), "{error}");
        assert!(runs && error.reason.contains("took too long"), "{error}");
    });
}
