//! A host and a port, as people write them in flags.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

/// A host, by its name or IP address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// An IPv6 address is without brackets here.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// A text is not an [`Address`].
pub(crate) struct NoAddress;

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let (host, port) = text.rsplit_once(':').ok_or(NoAddress)?;
        let port = port.parse().map_err(|_| NoAddress)?;
        let host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
            Some(inner) if inner.parse::<Ipv6Addr>().is_ok() => inner,
            Some(_) => return Err(NoAddress),
            None => host,
        };
        let is_name = !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        if !is_name && host.parse::<IpAddr>().is_err() {
            return Err(NoAddress);
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}
