// SPDX-License-Identifier: Apache-2.0
//! Why an operation ended without a result: a code that programs act on, and a sentence for people.

/// What kind of failure it is. The names go over the session protocol (docs/session.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// The ranks asked for different things under the same number of a group.
    Mismatch,
    /// A rank, or the parameter server, has gone or started anew.
    PeerGone,
    /// A sidecar or the parameter server is silent.
    Stalled,
    /// A rank gave the group up because the group's time-out was over.
    Timeout,
    /// A rank gave the group up for another reason.
    Aborted,
    /// The owner of the transport ended it.
    Cancelled,
    /// The job went to another epoch.
    Epoch,
    /// The pod is being deleted.
    Shutdown,
    /// The caller asked for what cannot be.
    Protocol,
    Internal,
}

impl Code {
    pub const ALL: [Self; 10] = [
        Self::Mismatch,
        Self::PeerGone,
        Self::Stalled,
        Self::Timeout,
        Self::Aborted,
        Self::Cancelled,
        Self::Epoch,
        Self::Shutdown,
        Self::Protocol,
        Self::Internal,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mismatch => "Mismatch",
            Self::PeerGone => "PeerGone",
            Self::Stalled => "Stalled",
            Self::Timeout => "Timeout",
            Self::Aborted => "Aborted",
            Self::Cancelled => "Cancelled",
            Self::Epoch => "Epoch",
            Self::Shutdown => "Shutdown",
            Self::Protocol => "Protocol",
            Self::Internal => "Internal",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.name() == name)
    }

    /// Its number on the control channel.
    #[must_use]
    pub fn number(self) -> u8 {
        Self::ALL.iter().position(|code| *code == self).unwrap_or(0) as u8
    }

    /// The opposite of `number`; what is not known is `Internal`.
    #[must_use]
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Internal)
    }
}

/// Why an operation ended without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub text: String,
    /// Nothing later of the same group can go well either.
    pub broken: bool,
}

impl Failure {
    /// A failure of one operation.
    #[must_use]
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), broken: false }
    }

    /// A failure after which nothing of the group can go well.
    #[must_use]
    pub fn breaking(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), broken: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_names_and_numbers() {
        for code in Code::ALL {
            assert_eq!(Code::parse(code.name()), Some(code));
            assert_eq!(Code::from_number(code.number()), code);
        }
        assert_eq!(Code::from_number(200), Code::Internal);
        assert_eq!(Code::parse("mismatch"), None);
    }
}
