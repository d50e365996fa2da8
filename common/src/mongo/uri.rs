//! The connection string, before the driver reads it: blanks, and options that only other drivers know.
//!
//! The driver refuses a whole connection string because of one such option. The options here change only speed or the types of a client,
//! or Recruiter sets them itself, so they are left out with a warning. What concerns the security of the connection is never left out.

use super::{ConnectError, connect_error::invalid};

/// An option that was left out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ignored {
    pub(crate) option: String,
    pub(crate) why: &'static str,
}

/// The options that the driver knows, except those of [`IGNORED`].
const KNOWN: [&str; 33] = [
    "appname",
    "authmechanism",
    "authmechanismproperties",
    "authsource",
    "connecttimeoutms",
    "directconnection",
    "heartbeatfrequencyms",
    "loadbalanced",
    "localthresholdms",
    "maxconnecting",
    "maxidletimems",
    "maxpoolsize",
    "maxstalenessseconds",
    "minpoolsize",
    "readconcernlevel",
    "readpreference",
    "readpreferencetags",
    "replicaset",
    "retryreads",
    "retrywrites",
    "servermonitoringmode",
    "serverselectiontimeoutms",
    "srvmaxhosts",
    "srvservicename",
    "ssl",
    "tls",
    "tlsallowinvalidcertificates",
    "tlscafile",
    "tlscertificatekeyfile",
    "tlsinsecure",
    "w",
    "waitqueuetimeoutms",
    "wtimeoutms",
];

const COMPRESSION: &str = "Recruiter does not compress what it sends to MongoDB";
const LIMITS: &str = "Recruiter sets the time limit of each operation itself";
const CONCERN: &str = "Recruiter sets the write concern of each operation itself (majority, journaled)";
const IGNORED: [(&str, &str); 11] = [
    ("compressors", COMPRESSION),
    ("zlibcompressionlevel", COMPRESSION),
    ("uuidrepresentation", "Recruiter stores no UUIDs"),
    ("timeoutms", LIMITS),
    ("sockettimeoutms", LIMITS),
    ("wtimeout", LIMITS),
    ("j", CONCERN),
    ("journal", CONCERN),
    ("safe", CONCERN),
    ("tlsdisableocspendpointcheck", "Recruiter asks no OCSP server"),
    ("tlsdisablecertificaterevocationcheck", "Recruiter does not check whether a certificate is revoked"),
];

/// What to do with a key that has a password.
pub(super) const DECRYPT: &str = "Recruiter cannot read an encrypted key: decrypt it (openssl pkey -in FILE -out KEY), write the certificate and this key into one file that only Recruiter's user may read, and name it in tlsCertificateKeyFile";

/// Options that cannot be ignored, and what to do instead.
const REFUSED: [(&str, &str); 10] = [
    ("tlscertificatekeyfilepassword", DECRYPT),
    (
        "tlsallowinvalidhostnames",
        "give the server a certificate with the name of the host; in a test, write tlsAllowInvalidCertificates=true",
    ),
    (
        "tlscrlfile",
        "Recruiter cannot read lists of revoked certificates; remove the option, and let certificates be valid for a short time",
    ),
    ("collectionprefix", "it is no option of a connection string; write --collection-prefix or RECRUITER_COLLECTION_PREFIX in its place"),
    ("proxyhost", "Recruiter cannot connect through a SOCKS5 proxy; connect through a tunnel, and write its address"),
    ("sslcertificateauthorityfile", "write tlsCAFile in its place"),
    ("ssl_ca_certs", "write tlsCAFile in its place"),
    ("sslca", "write tlsCAFile in its place"),
    ("ssl_certfile", "write tlsCertificateKeyFile in its place, a file with the certificate and its key"),
    ("sslclientcertificatekeyfile", "write tlsCertificateKeyFile in its place, a file with the certificate and its key"),
];

/// The connection string without the blanks around it and without the options that this driver does not know, and these options.
///
/// # Errors
/// [`ConnectError::InvalidUri`] for a blank or a control character within it, an incomplete code after a `%`, or an
/// option whose name is none, [`ConnectError::UriOption`] for an option that cannot be ignored.
pub(crate) fn without_foreign_options(text: &str) -> Result<(String, Vec<Ignored>), ConnectError> {
    let text = text.trim();
    let (address, options) = text.split_once('?').unwrap_or((text, ""));
    // Of the address only, because a blank in a value is the driver's to judge. `%0A` and the like are decoded later.
    let encoded = address.rsplit_once(['/', '@']).map_or("", |(_, database)| database);
    let has_encoded = encoded.split('%').skip(1).any(|code| matches!(code.get(..2), Some("09" | "0a" | "0A" | "0d" | "0D" | "20")));
    if has_encoded || text.contains(|character: char| character.is_control() || character.is_whitespace()) {
        let message = "it contains a blank, a line break or a control character (in a password, write a blank as %20)";
        return Err(invalid(std::io::Error::other(message).into()));
    }
    // The driver panics at a `%` before a character of several bytes.
    let is_code = |code: &str| code.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !address.split('%').skip(1).all(is_code) {
        return Err(invalid(std::io::Error::other("two hexadecimal digits must follow a `%` (in a password, write `%` as %25)").into()));
    }
    // The messages below repeat the names of options.
    let of_name = |character: char| character.is_ascii_alphanumeric() || "_.-".contains(character);
    let name_of = |option: &str| option.split('=').next().unwrap_or_default().to_lowercase();
    let is_known = |name: &str| KNOWN.contains(&name) || IGNORED.iter().chain(&REFUSED).any(|(known, _)| *known == name);
    // The value of a known option, such as a file of `recruiter-worker@main.service`, may have an `@`.
    let is_password = options.contains('@') && !address.contains('@') && !is_known(&name_of(options));
    if is_password || !options.split('&').all(|option| name_of(option).chars().all(of_name)) {
        let message = "after the `?` there is something other than options like NAME=VALUE (in a password, write `?` as %3F)";
        return Err(invalid(std::io::Error::other(message).into()));
    }
    let (mut kept, mut ignored) = (Vec::new(), Vec::new());
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let key = name.to_lowercase();
        let is_this = |entry: &&(&str, &'static str)| entry.0 == key;
        if let Some((_, remedy)) = REFUSED.iter().find(is_this) {
            return Err(ConnectError::UriOption { option: name.into(), remedy: (*remedy).into() });
        }
        if key == "maxpoolsize" && value.parse::<u32>() == Ok(0) {
            ignored.push(Ignored { option: name.into(), why: "0 means no limit, and Recruiter uses at most 20 connections" });
        } else if KNOWN.contains(&key.as_str()) {
            kept.push(option);
        } else if let Some((_, why)) = IGNORED.iter().find(is_this) {
            ignored.push(Ignored { option: name.into(), why });
        } else if ["tls", "ssl", "auth", "proxy", "gssapi", "autoencrypt"].iter().any(|secure| key.starts_with(secure)) {
            let remedy = "Recruiter does not know it, and does not ignore what concerns encryption or authentication; correct or remove it";
            return Err(ConnectError::UriOption { option: name.into(), remedy: remedy.into() });
        } else {
            ignored.push(Ignored { option: name.into(), why: "Recruiter does not know it; check its spelling, or remove it" });
        }
    }
    let options = if kept.is_empty() { String::new() } else { format!("?{}", kept.join("&")) };
    // The driver wants a `/` before the options, and other drivers do not.
    let has_path =
        address.split_once("://").is_none_or(|(_, hosts)| hosts.rsplit_once('@').map_or(hosts, |(_, hosts)| hosts).contains('/'));
    let slash = if options.is_empty() || has_path { "" } else { "/" };
    Ok((format!("{address}{slash}{options}"), ignored))
}

/// The connection string without what is secret: the password, and the values of options that may be. A text that is none is secret.
#[cfg(feature = "process")]
pub(crate) fn redacted(text: &str) -> String {
    const HIDDEN: &str = "****";
    // Without a `/`, a password may precede another `://`.
    let is_scheme = |(scheme, _): &(&str, &str)| scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+');
    let Some((scheme, rest)) = text.trim().split_once("://").filter(is_scheme) else { return HIDDEN.into() };
    // A password may contain every character, also those that should be encoded.
    let (user, rest) = match rest.rsplit_once('@') {
        Some((user, rest)) => {
            let user = user.split_once(':').map_or(user.to_owned(), |(name, _)| format!("{name}:{HIDDEN}"));
            (format!("{user}@"), rest)
        }
        // Without the `@`, a password is where the port should be.
        None if ports(rest).any(|port| !port.bytes().all(|byte| byte.is_ascii_digit())) => return format!("{scheme}://{HIDDEN}"),
        None => (String::new(), rest),
    };
    let Some((address, options)) = rest.split_once('?') else { return format!("{scheme}://{user}{rest}") };
    let option = |option: &str| {
        let name = option.split('=').next().unwrap_or_default();
        let key = name.to_lowercase();
        let is_open = KNOWN.contains(&key.as_str()) && key != "authmechanismproperties";
        if is_open { option.to_owned() } else { format!("{name}={HIDDEN}") }
    };
    format!("{scheme}://{user}{address}?{}", options.split('&').map(option).collect::<Vec<_>>().join("&"))
}

/// What follows the colon in each address.
#[cfg(feature = "process")]
fn ports(rest: &str) -> impl Iterator<Item = &str> {
    let addresses = rest.split(['/', '?']).next().unwrap_or_default();
    // An address of IPv6 is in brackets.
    addresses.split(',').filter_map(|address| address.rsplit(']').next()?.split_once(':')).map(|(_, port)| port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_other_drivers_are_left_out_and_the_others_stay() {
        let check = |options: &str, kept: &str, ignored: &[&str]| {
            let (uri, left_out) = without_foreign_options(&format!("mongodb://u:p@h:1,i:2/jobs?{options}\r\n")).expect(options);
            assert_eq!(uri, format!("mongodb://u:p@h:1,i:2/jobs{kept}"));
            assert_eq!(left_out.iter().map(|ignored| ignored.option.as_str()).collect::<Vec<_>>(), ignored);
            assert!(mongodb::options::ConnectionString::parse(&uri).is_ok(), "{uri}");
        };
        check("replicaSet=rs0&w=majority", "?replicaSet=rs0&w=majority", &[]);
        check("compressors=snappy,zlib&zlibCompressionLevel=9", "", &["compressors", "zlibCompressionLevel"]);
        check("uuidRepresentation=standard&replicaSet=rs0&timeoutMS=5000", "?replicaSet=rs0", &["uuidRepresentation", "timeoutMS"]);
        check("socketTimeoutMS=0&j=true&journal=x&wtimeout=5&tls=true", "?tls=true", &["socketTimeoutMS", "j", "journal", "wtimeout"]);
        check("tlsDisableOCSPEndpointCheck=true&ssl=true&slaveOk=true", "?ssl=true", &["tlsDisableOCSPEndpointCheck", "slaveOk"]);
        check("maxPoolSize=0&minPoolSize=0", "?minPoolSize=0", &["maxPoolSize"]);
        check("maxPoolSize=50&tlsDisableCertificateRevocationCheck=true", "?maxPoolSize=50", &["tlsDisableCertificateRevocationCheck"]);
        check("a=1&&b", "", &["a", "b"]);
        let file = "tlsCertificateKeyFile=/run/credentials/recruiter-worker@main.service/key";
        assert_eq!(without_foreign_options(&format!("mongodb://h/?{file}")).expect(file).0, format!("mongodb://h/?{file}"));
        assert_eq!(without_foreign_options(" mongodb://h?tls=true\n").expect("a string").0, "mongodb://h/?tls=true");
    }

    #[cfg(feature = "process")]
    #[test]
    fn no_secret_of_a_connection_string_is_shown() {
        for (uri, shown) in [
            ("mongodb://h:1,i:2/jobs?replicaSet=rs0", "mongodb://h:1,i:2/jobs?replicaSet=rs0"),
            (" mongodb+srv://u:secret@h/jobs?authSource=admin\n", "mongodb+srv://u:****@h/jobs?authSource=admin"),
            ("mongodb://u:se@cr/et?:x@h/jobs", "mongodb://u:****@h/jobs"),
            ("mongodb://u:secret/jobs", "mongodb://****"),
            ("mongodb://u:secreth:1,i:2/jobs", "mongodb://****"),
            ("mongodb://[::1]:27017,h/jobs", "mongodb://[::1]:27017,h/jobs"),
            ("mongodb://u@h/jobs?x=secret&w=1", "mongodb://u@h/jobs?x=****&w=1"),
            ("mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:secret", "mongodb://h/?authMechanismProperties=****"),
            ("mongodb://h/?tlsCertificateKeyFilePassword=secret", "mongodb://h/?tlsCertificateKeyFilePassword=****"),
            ("u:secret@h", "****"),
            ("mongodb:/u:secret@h://x", "****"),
        ] {
            assert_eq!(redacted(uri), shown);
        }
    }

    #[test]
    fn what_concerns_security_is_refused_with_its_remedy() {
        for (option, remedy) in [
            ("tlsAllowInvalidHostnames=true", "tlsAllowInvalidCertificates"),
            ("ssl_ca_certs=/x", "write tlsCAFile"),
            ("tlsCAFiles=/x", "correct or remove it"),
            ("authMechanisms=x", "correct or remove it"),
            ("proxyHost=x", "tunnel"),
            ("collectionPrefix=jobs_", "--collection-prefix"),
            ("tlsCertificateKeyFilePassword=x", "openssl pkey"),
        ] {
            let problem = without_foreign_options(&format!("mongodb://h/jobs?{option}")).expect_err(option).to_string();
            assert!(problem.contains(remedy) && !problem.contains("similar"), "{problem}");
        }
        for uri in [
            "mongodb://h/jo bs",
            "mongodb://h/jobs\n?tls=true",
            "mongodb://h/jobs%0A?tls=true",
            "mongodb://h\0/jobs",
            "mongodb://h/jobs%20",
        ] {
            assert!(without_foreign_options(uri).is_err_and(|error| error.to_string().contains("line break")), "{uri}");
        }
        for uri in ["mongodb://u:a%ä@h/jobs", "mongodb://u:a%f@h", "mongodb://u%:a@h", "mongodb://h/%"] {
            assert!(without_foreign_options(uri).is_err_and(|error| error.to_string().contains("%25")), "{uri}");
        }
        for uri in ["mongodb://u:a?secret@h/jobs", "mongodb://u:a?b=secret@h/jobs", "mongodb://u:a@h?se/cret@h"] {
            let problem = without_foreign_options(uri).expect_err(uri).to_string();
            assert!(problem.contains("%3F") && !problem.contains("cret"), "{problem}");
        }
    }
}
