//! libvirt's functions, and the only `unsafe` code of this crate: each function is called in one place, through a method that takes and
//! returns Rust's types.
//!
//! The declarations follow the public headers `libvirt-host.h`, `libvirt-domain.h`, `libvirt-qemu.h` and `virterror.h`. Only functions
//! are called whose arguments are pointers, numbers and texts, so that no layout of a structure is assumed, with one exception:
//! `virDomainJobInfo`, of which the first member is read.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_longlong, c_uint, c_ulong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{LoadError, Reported};

/// The names of the libraries for the dynamic loader. The number is libvirt's promise to stay compatible.
const LIBRARIES: [&str; 2] = ["libvirt.so.0", "libvirt-qemu.so.0"];
/// Positions in [`LIBRARIES`].
const LIBVIRT: usize = 0;
const QEMU: usize = 1;
/// `VIR_UUID_STRING_BUFLEN`.
const UUID_BYTES: usize = 37;
/// Bytes of a `virDomainJobInfo` (an `int`, padded, and twelve numbers of 64 bits), and room for members that a later release might add.
const JOB_INFO_BYTES: usize = 512;

type Callback =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *const c_char, c_longlong, c_uint, *const c_char, *mut c_void);
type Free = unsafe extern "C" fn(*mut c_void);
type Handler = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// Declares the functions and finds all of them in the libraries.
macro_rules! functions {
    ($($library:ident { $($field:ident: $name:literal fn($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        struct Functions {
            $($($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
            /// Since 8.2.
            monitor_command_with_files: Option<MonitorCommandWithFiles>,
        }

        impl Functions {
            fn find(libraries: &[Library; 2]) -> Result<Self, LoadError> {
                // SAFETY: each name is looked up with the type that its public header declares. The pointers outlive the libraries' handles,
                // which are never closed (see `Api::load`).
                unsafe {
                    Ok(Self {
                        $($($field: *libraries[$library].get($name.as_bytes()).map_err(|_| LoadError::MissingFunction { function: $name })?,)*)*
                        monitor_command_with_files: libraries[QEMU].get(b"virDomainQemuMonitorCommandWithFiles").ok().map(|found| *found),
                    })
                }
            }
        }
    };
}

type MonitorCommandWithFiles = unsafe extern "C" fn(
    *mut c_void,
    *const c_char,
    c_uint,
    *mut c_int,
    *mut c_uint,
    *mut *mut c_int,
    *mut *mut c_char,
    c_uint,
) -> c_int;

functions! {
    LIBVIRT {
        get_version: "virGetVersion" fn(*mut c_ulong, *const c_char, *mut c_ulong) -> c_int;
        initialize: "virInitialize" fn() -> c_int;
        set_error_handler: "virSetErrorFunc" fn(*mut c_void, Option<Handler>);
        last_error_code: "virGetLastErrorCode" fn() -> c_int;
        last_error_message: "virGetLastErrorMessage" fn() -> *const c_char;
        register_event_loop: "virEventRegisterDefaultImpl" fn() -> c_int;
        run_event_loop: "virEventRunDefaultImpl" fn() -> c_int;

        open: "virConnectOpen" fn(*const c_char) -> *mut c_void;
        close: "virConnectClose" fn(*mut c_void) -> c_int;
        driver: "virConnectGetType" fn(*mut c_void) -> *const c_char;
        uri: "virConnectGetURI" fn(*mut c_void) -> *mut c_char;
        server_version: "virConnectGetLibVersion" fn(*mut c_void, *mut c_ulong) -> c_int;
        set_keep_alive: "virConnectSetKeepAlive" fn(*mut c_void, c_int, c_uint) -> c_int;
        is_alive: "virConnectIsAlive" fn(*mut c_void) -> c_int;

        domain_by_name: "virDomainLookupByName" fn(*mut c_void, *const c_char) -> *mut c_void;
        domain_by_uuid: "virDomainLookupByUUIDString" fn(*mut c_void, *const c_char) -> *mut c_void;
        free_domain: "virDomainFree" fn(*mut c_void) -> c_int;
        name: "virDomainGetName" fn(*mut c_void) -> *const c_char;
        uuid: "virDomainGetUUIDString" fn(*mut c_void, *mut c_char) -> c_int;
        xml: "virDomainGetXMLDesc" fn(*mut c_void, c_uint) -> *mut c_char;
        state: "virDomainGetState" fn(*mut c_void, *mut c_int, *mut c_int, c_uint) -> c_int;
        job: "virDomainGetJobInfo" fn(*mut c_void, *mut c_void) -> c_int;
        is_persistent: "virDomainIsPersistent" fn(*mut c_void) -> c_int;
        suspend: "virDomainSuspend" fn(*mut c_void) -> c_int;
        resume: "virDomainResume" fn(*mut c_void) -> c_int;
        destroy: "virDomainDestroyFlags" fn(*mut c_void, c_uint) -> c_int;
        restore: "virDomainRestoreFlags" fn(*mut c_void, *const c_char, *const c_char, c_uint) -> c_int;
    }
    QEMU {
        monitor_command: "virDomainQemuMonitorCommand" fn(*mut c_void, *const c_char, *mut *mut c_char, c_uint) -> c_int;
        register_monitor_event: "virConnectDomainQemuMonitorEventRegister"
            fn(*mut c_void, *mut c_void, *const c_char, Callback, *mut c_void, Free, c_uint) -> c_int;
        deregister_monitor_event: "virConnectDomainQemuMonitorEventDeregister" fn(*mut c_void, c_int) -> c_int;
    }
}

/// The loaded libraries.
pub(crate) struct Api(Functions);

impl Api {
    /// Loads the libraries and begins their event loop, which the caller runs.
    pub(crate) fn load() -> Result<Self, LoadError> {
        let libraries = [dlopen(LIBRARIES[LIBVIRT])?, dlopen(LIBRARIES[QEMU])?];
        let functions = Functions::find(&libraries)?;
        // libvirt leaves destructors of thread keys behind, so it is never unloaded.
        std::mem::forget(libraries);
        let api = Self(functions);
        // SAFETY: no argument, and a handler that lives as long as the program. Without a handler libvirt writes each error to standard error.
        let begun = unsafe {
            (api.0.set_error_handler)(ptr::null_mut(), Some(ignore_error));
            (api.0.initialize)() == 0 && (api.0.register_event_loop)() == 0
        };
        if begun { Ok(api) } else { Err(LoadError::NotInitialized { why: api.last_error().message }) }
    }

    /// Returns the release of the client library: 1 000 000 × major + 1 000 × minor + micro.
    pub(crate) fn version(&self) -> Result<u64, Reported> {
        let mut version: c_ulong = 0;
        // SAFETY: the number is ours; without a type no version of a driver is asked for.
        let result = unsafe { (self.0.get_version)(&raw mut version, ptr::null(), ptr::null_mut()) };
        self.checked(result).map(|()| version)
    }

    /// Runs one turn of the event loop: waits for an event, and delivers it. The callbacks run on this thread.
    pub(crate) fn run_event_loop(&self) -> Result<(), Reported> {
        // SAFETY: the event loop was registered by `load`.
        self.checked(unsafe { (self.0.run_event_loop)() })
    }

    /// Returns whether commands of the monitor can be given descriptors.
    pub(crate) fn passes_descriptors(&self) -> bool {
        self.0.monitor_command_with_files.is_some()
    }

    fn last_error(&self) -> Reported {
        // SAFETY: the text belongs to this thread's error and is copied before the next call; without an error it is a constant.
        unsafe {
            Reported {
                code: (self.0.last_error_code)(),
                message: copied((self.0.last_error_message)()).unwrap_or_default(),
            }
        }
    }

    fn checked(&self, result: c_int) -> Result<(), Reported> {
        if result < 0 { Err(self.last_error()) } else { Ok(()) }
    }

    /// Takes a text that libvirt has allocated.
    fn taken(&self, text: *mut c_char) -> Result<String, Reported> {
        // SAFETY: null, or a text that libvirt has allocated by malloc(3) for the caller, who frees it (see the functions' documentation).
        unsafe {
            let copy = copied(text).ok_or_else(|| self.last_error());
            libc::free(text.cast());
            copy
        }
    }
}

fn dlopen(name: &str) -> Result<Library, LoadError> {
    // SAFETY: loading runs the constructors of the library and of its dependencies, which only set up their own state. That the file is the
    // library its name says is the trust that an administrator gives to every file in the loader's path.
    unsafe { Library::open(Some(OsStr::new(name)), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let why = match &error {
            libloading::Error::DlOpen { source } => source.to_string(),
            other => other.to_string(),
        };
        LoadError::NotFound { library: name.to_owned(), why }
    })
}

/// Copies a text of libvirt; none for a null pointer.
///
/// # Safety
/// The pointer is null, or points to a text that ends with a zero byte.
unsafe fn copied(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Errors are returned by the calls, too.
unsafe extern "C" fn ignore_error(_: *mut c_void, _: *mut c_void) {}

/// A connection.
pub(crate) struct RawConnection {
    api: Arc<Api>,
    pointer: NonNull<c_void>,
}

// SAFETY: libvirt's connections may be used by several threads at the same time: each call locks what it uses.
unsafe impl Send for RawConnection {}
// SAFETY: as above.
unsafe impl Sync for RawConnection {}

impl RawConnection {
    pub(crate) fn open(api: &Arc<Api>, uri: Option<&CStr>) -> Result<Self, Reported> {
        // SAFETY: null, or a text that ends with a zero byte and outlives the call.
        let pointer = unsafe { (api.0.open)(uri.map_or(ptr::null(), CStr::as_ptr)) };
        let pointer = NonNull::new(pointer).ok_or_else(|| api.last_error())?;
        Ok(Self { api: Arc::clone(api), pointer })
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    /// Returns the driver's name, for instance `QEMU`.
    pub(crate) fn driver(&self) -> Option<String> {
        // SAFETY: the connection is open; the text belongs to it.
        unsafe { copied((self.api.0.driver)(self.pointer.as_ptr())) }
    }

    pub(crate) fn uri(&self) -> Result<String, Reported> {
        // SAFETY: the connection is open.
        self.api.taken(unsafe { (self.api.0.uri)(self.pointer.as_ptr()) })
    }

    pub(crate) fn server_version(&self) -> Result<u64, Reported> {
        let mut version: c_ulong = 0;
        // SAFETY: the connection is open, and the number is ours.
        let result = unsafe { (self.api.0.server_version)(self.pointer.as_ptr(), &raw mut version) };
        self.api.checked(result).map(|()| version)
    }

    /// Has the event loop ask the server after `seconds` of silence whether it lives, and give the connection up after `count` questions.
    pub(crate) fn set_keep_alive(&self, seconds: c_int, count: c_uint) -> Result<(), Reported> {
        // SAFETY: the connection is open.
        self.api.checked(unsafe { (self.api.0.set_keep_alive)(self.pointer.as_ptr(), seconds, count) })
    }

    pub(crate) fn is_alive(&self) -> bool {
        // SAFETY: the connection is open.
        unsafe { (self.api.0.is_alive)(self.pointer.as_ptr()) == 1 }
    }

    /// Restores a domain from a saved image. `flags`: `virDomainSaveRestoreFlags`.
    pub(crate) fn restore(&self, path: &CStr, xml: Option<&CStr>, flags: c_uint) -> Result<(), Reported> {
        let xml = xml.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: the connection is open; the texts end with a zero byte and outlive the call.
        self.api.checked(unsafe { (self.api.0.restore)(self.pointer.as_ptr(), path.as_ptr(), xml, flags) })
    }
}

impl Drop for RawConnection {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once. Domains and callbacks hold references of their own.
        unsafe { (self.api.0.close)(self.pointer.as_ptr()) };
    }
}

/// A domain, with its connection.
pub(crate) struct RawDomain {
    connection: Arc<RawConnection>,
    pointer: NonNull<c_void>,
}

// SAFETY: as for connections.
unsafe impl Send for RawDomain {}
// SAFETY: as for connections.
unsafe impl Sync for RawDomain {}

impl RawDomain {
    pub(crate) fn by_name(connection: &Arc<RawConnection>, name: &CStr) -> Result<Self, Reported> {
        // SAFETY: the connection is open; the text ends with a zero byte and outlives the call.
        let pointer = unsafe { (connection.api.0.domain_by_name)(connection.pointer.as_ptr(), name.as_ptr()) };
        Self::found(connection, pointer)
    }

    pub(crate) fn by_uuid(connection: &Arc<RawConnection>, uuid: &CStr) -> Result<Self, Reported> {
        // SAFETY: as for `by_name`.
        let pointer = unsafe { (connection.api.0.domain_by_uuid)(connection.pointer.as_ptr(), uuid.as_ptr()) };
        Self::found(connection, pointer)
    }

    fn found(connection: &Arc<RawConnection>, pointer: *mut c_void) -> Result<Self, Reported> {
        let pointer = NonNull::new(pointer).ok_or_else(|| connection.api.last_error())?;
        Ok(Self { connection: Arc::clone(connection), pointer })
    }

    fn functions(&self) -> &Functions {
        &self.connection.api.0
    }

    fn checked(&self, result: c_int) -> Result<(), Reported> {
        self.connection.api.checked(result)
    }

    pub(crate) fn name(&self) -> Option<String> {
        // SAFETY: the domain is valid; the text belongs to it.
        unsafe { copied((self.functions().name)(self.pointer.as_ptr())) }
    }

    pub(crate) fn uuid(&self) -> Result<String, Reported> {
        let mut text: [c_char; UUID_BYTES] = [0; UUID_BYTES];
        // SAFETY: the domain is valid, and the buffer has the documented length, the last byte of which stays zero.
        unsafe {
            self.checked((self.functions().uuid)(self.pointer.as_ptr(), text.as_mut_ptr()))?;
            Ok(copied(text.as_ptr()).unwrap_or_default())
        }
    }

    /// `flags`: `virDomainXMLFlags`.
    pub(crate) fn xml(&self, flags: c_uint) -> Result<String, Reported> {
        // SAFETY: the domain is valid.
        self.connection.api.taken(unsafe { (self.functions().xml)(self.pointer.as_ptr(), flags) })
    }

    /// Returns `virDomainState` and the reason, whose meaning depends on the state.
    pub(crate) fn state(&self) -> Result<(c_int, c_int), Reported> {
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the domain is valid, and the numbers are ours.
        let result = unsafe { (self.functions().state)(self.pointer.as_ptr(), &raw mut state, &raw mut reason, 0) };
        self.checked(result).map(|()| (state, reason))
    }

    /// Returns `virDomainJobType`.
    pub(crate) fn job(&self) -> Result<c_int, Reported> {
        /// With the alignment of `virDomainJobInfo`.
        #[repr(C, align(8))]
        struct JobInfo([u8; JOB_INFO_BYTES]);
        let mut info = JobInfo([0; JOB_INFO_BYTES]);
        // SAFETY: the domain is valid, and libvirt fills no more than the structure, which is shorter than the buffer.
        let result = unsafe { (self.functions().job)(self.pointer.as_ptr(), (&raw mut info).cast()) };
        let [a, b, c, d, ..] = info.0;
        self.checked(result).map(|()| c_int::from_ne_bytes([a, b, c, d]))
    }

    pub(crate) fn is_persistent(&self) -> Result<bool, Reported> {
        // SAFETY: the domain is valid.
        let result = unsafe { (self.functions().is_persistent)(self.pointer.as_ptr()) };
        self.checked(result).map(|()| result == 1)
    }

    pub(crate) fn suspend(&self) -> Result<(), Reported> {
        // SAFETY: the domain is valid.
        self.checked(unsafe { (self.functions().suspend)(self.pointer.as_ptr()) })
    }

    pub(crate) fn resume(&self) -> Result<(), Reported> {
        // SAFETY: the domain is valid.
        self.checked(unsafe { (self.functions().resume)(self.pointer.as_ptr()) })
    }

    /// `flags`: `virDomainDestroyFlagsValues`.
    pub(crate) fn destroy(&self, flags: c_uint) -> Result<(), Reported> {
        // SAFETY: the domain is valid.
        self.checked(unsafe { (self.functions().destroy)(self.pointer.as_ptr(), flags) })
    }

    pub(crate) fn monitor_command(&self, command: &CStr) -> Result<String, Reported> {
        let mut answer = ptr::null_mut();
        // SAFETY: the domain is valid, the text ends with a zero byte and outlives the call, and the pointer is ours.
        let result =
            unsafe { (self.functions().monitor_command)(self.pointer.as_ptr(), command.as_ptr(), &raw mut answer, 0) };
        self.checked(result)?;
        self.connection.api.taken(answer)
    }

    /// None if the library lacks the function.
    pub(crate) fn monitor_command_with_descriptors(
        &self,
        command: &CStr,
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<Result<String, Reported>> {
        let call = self.functions().monitor_command_with_files?;
        let mut given: Vec<c_int> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let (mut answer, mut returned, mut returned_count) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the domain is valid, the text ends with a zero byte, the descriptors are open, all of these outlive the call, and the other
        // pointers are ours. Returned descriptors belong to the caller, and so does their array, which malloc(3) has made.
        let result = unsafe {
            let result = call(
                self.pointer.as_ptr(),
                command.as_ptr(),
                given.len() as c_uint,
                given.as_mut_ptr(),
                &raw mut returned_count,
                &raw mut returned,
                &raw mut answer,
                0,
            );
            if !returned.is_null() {
                for at in 0..returned_count as usize {
                    libc::close(*returned.add(at));
                }
                libc::free(returned.cast());
            }
            result
        };
        Some(self.checked(result).and_then(|()| self.connection.api.taken(answer)))
    }

    /// Has `on_event` called, on the thread of the event loop, for each event of the domain's QEMU, until the result is dropped.
    pub(crate) fn on_monitor_event(self: &Arc<Self>, on_event: OnEvent) -> Result<RawSubscription, Reported> {
        let opaque = Box::into_raw(Box::new(on_event)).cast::<c_void>();
        let connection = self.connection.pointer.as_ptr();
        // SAFETY: connection and domain are valid. libvirt owns `opaque` from here on: it passes it to `deliver` only, and to `free_on_event` once,
        // after the last event. Without a name all events are delivered.
        let number = unsafe {
            (self.functions().register_monitor_event)(
                connection,
                self.pointer.as_ptr(),
                ptr::null(),
                deliver,
                opaque,
                free_on_event,
                0,
            )
        };
        if number < 0 {
            let error = self.connection.api.last_error();
            // SAFETY: libvirt has refused the callback, and does not own it.
            unsafe { free_on_event(opaque) };
            return Err(error);
        }
        Ok(RawSubscription { domain: Arc::clone(self), number })
    }
}

impl Drop for RawDomain {
    fn drop(&mut self) {
        // SAFETY: found by libvirt, and freed once, before its connection is closed.
        unsafe { (self.functions().free_domain)(self.pointer.as_ptr()) };
    }
}

/// An event of QEMU's monitor.
pub(crate) struct RawEvent {
    pub(crate) name: String,
    /// -1 if QEMU does not know the time.
    pub(crate) seconds: i64,
    pub(crate) microseconds: u32,
    /// A JSON object; none if the event has no data.
    pub(crate) details: Option<String>,
}

pub(crate) type OnEvent = Box<dyn Fn(RawEvent) + Send + Sync>;

/// `virConnectDomainQemuMonitorEventCallback`. A panic in the closure ends the process, as for every function that C calls.
unsafe extern "C" fn deliver(
    _connection: *mut c_void,
    _domain: *mut c_void,
    event: *const c_char,
    seconds: c_longlong,
    microseconds: c_uint,
    details: *const c_char,
    opaque: *mut c_void,
) {
    // SAFETY: the pointer that was registered, which libvirt frees only after the last event; null or a text that ends with a zero byte each.
    unsafe {
        let on_event = &*opaque.cast::<OnEvent>();
        let name = copied(event).unwrap_or_default();
        on_event(RawEvent { name, seconds, microseconds, details: copied(details) });
    }
}

/// `virFreeCallback` of [`deliver`].
unsafe extern "C" fn free_on_event(opaque: *mut c_void) {
    // SAFETY: made by `Box::into_raw` from this type, and called once.
    drop(unsafe { Box::from_raw(opaque.cast::<OnEvent>()) });
}

/// Events are delivered until this is dropped. One that is being delivered meanwhile may still arrive.
pub(crate) struct RawSubscription {
    domain: Arc<RawDomain>,
    number: c_int,
}

impl Drop for RawSubscription {
    fn drop(&mut self) {
        let connection = self.domain.connection.pointer.as_ptr();
        // SAFETY: the connection is open, and has returned this number.
        unsafe { (self.domain.functions().deregister_monitor_event)(connection, self.number) };
    }
}

/// Returns a text for libvirt; none if it has a zero byte in it.
pub(crate) fn text(text: &str) -> Option<CString> {
    CString::new(text).ok()
}
